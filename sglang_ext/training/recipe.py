"""A training run in a directory: data in, checkpoint and exported drafts out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sglang_ext.core.spec.draft_config import default_target_layer_ids
from sglang_ext.training.batches import LessonCache, TextStream
from sglang_ext.training.draft import Draft, DraftShape
from sglang_ext.training.evaluate import Evaluation, evaluate
from sglang_ext.training.export import export, load_exported
from sglang_ext.training.shards import Text, read_texts
from sglang_ext.training.start import choose_vocabulary, fit_bigrams, new_draft
from sglang_ext.training.target import Target
from sglang_ext.training.train import Plan, Student, Teacher, Trainer, make_students

_CAPTURED_LAYERS = 3  # more would cost each draft a wider fc for little
_LONGEST = 2304  # tokens of the longest held-out text


@dataclass(frozen=True)
class Recipe:
    """What to train: `drafts` out of "dspark" and "dflash", and their sizes."""

    drafts: tuple[str, ...] = ("dspark", "dflash")
    layers: int = 2
    gamma: int = 7
    draft_vocab: int = 8192
    markov_rank: int = 64
    cache_bytes: int = 6_000_000_000

    def __post_init__(self) -> None:
        if not self.drafts or not set(self.drafts) <= {"dspark", "dflash"}:
            raise ValueError(f"drafts: expected dspark, dflash or both, found {self.drafts}")

    def shapes(self, target: Target, draft_vocab: int) -> dict[str, DraftShape]:
        """Shapes of the drafts, layer sizes as the target's.

        Both use DeepSpec's layout, in which the anchor row predicts: it drafts as many tokens as
        it runs rows, and a DFLASH draft can start from a DSPARK one.
        """
        config = target.config
        return {
            name: DraftShape(
                algorithm="DSPARK" if name == "dspark" else "DFLASH",
                hidden=target.hidden,
                intermediate=config["intermediate_size"],
                layers=self.layers,
                heads=config["num_attention_heads"],
                kv_heads=config["num_key_value_heads"],
                head_dim=config["head_dim"],
                block_size=self.gamma,
                target_layer_ids=default_target_layer_ids(target.num_layers, _CAPTURED_LAYERS),
                mask_token_id=spare_token(target),
                vocab=config["vocab_size"],
                draft_vocab=draft_vocab,
                markov_rank=self.markov_rank if name == "dspark" else 0,
                rope_theta=target.rope_theta,
                norm_eps=config["rms_norm_eps"],
            )
            for name in self.drafts
        }


def spare_token(target: Target) -> int:
    """A token that text does not contain, to stand for the mask: the one after the specials."""
    special = [target.config.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")]
    return max(token for token in special if token is not None) + 1


class Run:
    """The pieces of a training run, put together from its directory."""

    def __init__(
        self,
        target_path: Path,
        work: Path,
        recipe: Recipe,
        plan: Plan,
        report: Callable[[str], None] = print,
    ) -> None:
        self.work, self.recipe, self.plan, self.report = work, recipe, plan, report
        self.target = Target(target_path, slots=max(plan.texts, 8), capacity=_LONGEST)
        self.stream = TextStream(work / "train", texts=plan.texts, longest=640, seed=plan.seed)
        self.checkpoint = work / "checkpoint.pt"

    def trainer(self, start_from: Path | None = None) -> Trainer:
        """A trainer that goes on from the run's checkpoint, or starts a new one.

        With `start_from`, a new run takes the weights that fit from another run's checkpoint, or
        from an exported draft's folder; a DFLASH draft takes the backbone of a DSPARK one.
        """
        texts = self.stream.all_texts()
        saved = torch.load(self.checkpoint) if self.checkpoint.exists() else None
        exported = None
        if start_from is not None and start_from.is_dir():
            exported = load_exported(start_from, self.target)
        if saved:
            d2t = next(iter(saved["drafts"].values()))["d2t"]
        else:
            d2t = exported.d2t if exported is not None else self._vocabulary(texts)
        shapes = self.recipe.shapes(self.target, len(d2t))
        teacher = make_teacher(self.target, self.work, shapes, d2t, self.recipe.cache_bytes)
        lessons = list(teacher.lessons(texts[:8]))
        students = make_students(shapes, self.target, d2t, lessons, self.plan)
        held_out = read_texts(self.work / "held_out")
        trainer = Trainer(
            students, teacher, self.stream, held_out, self.plan, self.checkpoint, self.report
        )
        if saved:
            trainer.load(saved)
            self.report(f"going on from step {trainer.step}")
        elif exported is not None:
            for student in students:
                take_exported(student.draft, exported)
        elif start_from:
            take_weights(students, torch.load(start_from)["drafts"])
        else:
            self._fit_bigrams(students, texts)
        return trainer

    def _fit_bigrams(self, students: list[Student], texts: list[Text]) -> None:
        for student in students:
            if student.draft.markov_head is not None:
                loss = fit_bigrams(student.draft, texts)
                self.report(f"{student.name}: Markov tables fitted as bigrams, loss {loss:.2f}")

    def _vocabulary(self, texts: list[Text]) -> Tensor:
        d2t, covered = choose_vocabulary(
            texts, self.recipe.draft_vocab, self.target.config["vocab_size"]
        )
        self.report(f"draft vocabulary: {len(d2t):,} tokens cover {covered:.2%} of the answers")
        return d2t


def make_teacher(
    target: Target, work: Path, shapes: dict[str, DraftShape], d2t: Tensor, cache_bytes: int
) -> Teacher:
    """The target with a lesson cache in `work`."""
    layer_ids = next(iter(shapes.values())).target_layer_ids
    recipe = f"{target.config} {layer_ids} {d2t.tolist()}"
    cache = LessonCache(work / "lessons", recipe=recipe, limit=cache_bytes)
    return Teacher(target, layer_ids, d2t, cache)


@torch.no_grad()
def take_exported(draft: Draft, exported: Draft) -> None:
    """Copy an exported draft's weights into one in training, whose features are scaled.

    Raises:
        ValueError: the two read other layers or have other shapes.
    """
    for field in ("layers", "hidden", "intermediate", "target_layer_ids", "draft_vocab"):
        found, wanted = getattr(exported.shape, field), getattr(draft.shape, field)
        if found != wanted:
            raise ValueError(
                f"--start-from: {field}: expected {wanted}, found {found}. Train with the "
                "options that the exported draft was made with."
            )
    own = draft.state_dict()
    taken = {
        name: value
        for name, value in exported.state_dict().items()
        if name in own and own[name].shape == value.shape and not name.endswith("_scale")
    }
    taken["fc.weight"] = taken["fc.weight"] / draft.feature_scale
    draft.load_state_dict(taken, strict=False)


def take_weights(students: list[Student], drafts: dict[str, dict[str, Tensor]]) -> None:
    """Copy what fits from saved drafts: the same name's, else any.

    The draft vocabularies may differ; the Markov table's rows follow their tokens.
    """
    for student in students:
        saved = dict(drafts.get(student.name) or next(iter(drafts.values())))
        own = student.draft.state_dict()
        table = "markov_head.markov_w2.weight"
        if table in saved and table in own:
            saved[table] = _rows_by_token(own[table], own["d2t"], saved[table], saved["d2t"])
        saved["d2t"] = own["d2t"]
        fitting = {
            name: value
            for name, value in saved.items()
            if name in own and own[name].shape == value.shape
        }
        student.draft.load_state_dict(fitting, strict=False)


def _rows_by_token(own: Tensor, d2t: Tensor, saved: Tensor, saved_d2t: Tensor) -> Tensor:
    """`own` [n, rank] with the rows of every token that `saved` [m, rank] has too."""
    tokens, saved_tokens = (offsets + torch.arange(len(offsets)) for offsets in (d2t, saved_d2t))
    at = torch.searchsorted(saved_tokens, tokens).clamp_max(len(saved_tokens) - 1)
    there = saved_tokens[at] == tokens
    return torch.where(there[:, None], saved[at], own)


def export_run(target_path: Path, work: Path, out: Path) -> dict[str, Path]:
    """Export every draft of a run's checkpoint to `out`/<name>; returns the folders."""
    file = work / "checkpoint.pt"
    if not file.exists():
        raise FileNotFoundError(f"no checkpoint at {file}: run `train-draft train` first")
    state = torch.load(file)
    target = Target(target_path, slots=1, capacity=16)
    for name, shape in state["shapes"].items():
        saved = state["drafts"][name]
        draft = new_draft(DraftShape(**shape), target, saved["d2t"], positions=16)
        draft.load_state_dict(saved)
        export(draft, target.config, out / name)
    return {name: out / name for name in state["shapes"]}


def evaluate_exported(
    target_path: Path, work: Path, folders: dict[str, Path]
) -> dict[str, Evaluation]:
    """Held-out acceptance of exported drafts that share their target layers and vocabulary."""
    target = Target(target_path, slots=8, capacity=_LONGEST)
    drafts = {name: load_exported(path, target) for name, path in folders.items()}
    shapes = {name: draft.shape for name, draft in drafts.items()}
    d2t = next(iter(drafts.values())).d2t
    teacher = make_teacher(target, work, shapes, d2t, cache_bytes=6_000_000_000)
    return evaluate(drafts, read_texts(work / "held_out"), teacher.lessons)
