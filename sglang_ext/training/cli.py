"""`sglang-ext train-draft`: train DSPARK and DFLASH drafts for a Llama target on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from sglang_ext.inputs import (
    InputError,
    not_negative,
    output_folder,
    positive,
    refuse_without_effect,
)

if TYPE_CHECKING:
    from sglang_ext.training.evaluate import Evaluation
    from sglang_ext.training.generate import Generator
    from sglang_ext.training.prompts import Prompt
    from sglang_ext.training.shards import ShardWriter, Text

app = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown")
_console = Console(stderr=True)

TargetPath = Annotated[
    Path, typer.Option("--target", help="Target checkpoint (Llama, one bf16 safetensors file).")
]
PromptPath = Annotated[
    Path,
    typer.Option(
        "--prompts", help='JSONL file, or a directory of them: lines {"turns": ["a question"]}.'
    ),
]
Work = Annotated[Path, typer.Option("--work", help="Directory for data and checkpoints.")]
Threads = Annotated[
    int, typer.Option(min=1, max=1024, help="Torch threads. One process per core beats threads.")
]


@app.callback()
def main() -> None:
    """Train a DSPARK and a DFLASH draft for a small Llama target, on its own greedy answers.

    The steps, in order (each can be stopped and run again; it goes on where it was):

        sglang-ext train-draft prompts  --prompts DIR
        sglang-ext train-draft generate --prompts DIR --target T --work W --held-out
        sglang-ext train-draft generate --prompts DIR --target T --work W --minutes 120
        sglang-ext train-draft train    --target T --work W --minutes 60
        sglang-ext train-draft export   --target T --work W --out drafts/
        sglang-ext train-draft evaluate --target T --work W --draft drafts/dspark

    A tenth of the prompts, chosen by a hash of their text, is held out: nothing is generated from
    it or from near copies of it for training, and acceptance is measured on it alone.
    `generate` may run in several processes, and beside `train`, which picks up new data.
    """


@app.command()
def prompts(prompts: PromptPath) -> None:
    """Show how the prompts split into training and held-out ones."""
    from collections import Counter

    from sglang_ext.training.prompts import split

    given = _read_prompts(prompts)
    train, held = split(given)
    counts = [Counter(prompt.source for prompt in part) for part in (given, train, held)]
    table = Table("set", "kind", "given", "training", "held out")
    kinds = {prompt.source: prompt.kind for prompt in given}
    for source, kind in sorted(kinds.items()):
        table.add_row(source, kind, *(str(count[source]) for count in counts))
    table.add_row("all", "", *(str(len(part)) for part in (given, train, held)))
    _console.print(table)
    _console.print("A training prompt that nearly copies a held-out one is in neither.")


@app.command()
def generate(
    prompts: PromptPath,
    target: TargetPath,
    work: Work,
    minutes: Annotated[
        float, typer.Option(callback=positive, help="Stop after this long. Ignored by --held-out.")
    ] = (60.0),
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Answer the held-out prompts instead, once.")
    ] = False,
    slots: Annotated[int, typer.Option(min=1, max=65536, help="Texts generated at once.")] = 112,
    answer: Annotated[
        int, typer.Option(min=1, max=65536, help="Cut answers at this many tokens.")
    ] = 256,
    seed: Annotated[
        int, typer.Option(min=0, max=2**31 - 1, help="Differs between processes that run together.")
    ] = 0,
    threads: Threads = 1,
) -> None:
    """Let the target answer: training text (stops after --minutes), or the held-out prompts.

    Training prompts are the given ones, variations of them (other numbers and names), and ones the
    target writes itself; about 40 % math, 30 % code, 30 % chat. Text is stored as token shards.
    """
    import torch

    from sglang_ext.training.prompts import split
    from sglang_ext.training.shards import ShardWriter, read_texts

    torch.set_num_threads(threads)
    given = _read_prompts(prompts)
    _check_target(target)
    output_folder("--work", work)
    train, held = split(given)
    directory = work / ("held_out" if held_out else "train")
    if held_out and read_texts(directory):
        _console.print(f"{directory} is there already")
        return
    writer = ShardWriter(directory, writer=f"{seed:03d}", every=len(held) if held_out else 128)
    progress = _Progress(writer)
    if held_out:
        generator = _answer_held_out(held, target, answer, progress)
        generator.run()
    else:
        generator = _answer_training(train, held, target, slots, answer, seed, directory, progress)
        end = time.monotonic() + 60 * minutes
        try:
            generator.run(lambda: time.monotonic() < end)
        except KeyboardInterrupt:
            _console.print("stopped; finished texts are kept")
    writer.flush()
    progress.tell()


@app.command()
def train(
    ctx: typer.Context,
    target: TargetPath,
    work: Work,
    minutes: Annotated[
        float, typer.Option(callback=positive, help="Length of the learning-rate schedule.")
    ] = 60.0,
    drafts: Annotated[str, typer.Option(help="Which to train: dspark, dflash or both.")] = (
        "dspark,dflash"
    ),
    layers: Annotated[
        int, typer.Option(min=1, max=256, help="Draft layers, copied from the target's last.")
    ] = 2,
    gamma: Annotated[int, typer.Option(min=1, max=64, help="Tokens drafted per round.")] = 7,
    draft_vocab: Annotated[
        int,
        typer.Option(
            min=1,
            max=2**24,
            help="How many tokens the draft can say; a run that goes on, or starts from a draft's "
            "folder, has theirs.",
        ),
    ] = 8192,
    markov_rank: Annotated[
        int, typer.Option(min=1, max=65536, help="Rank of the Markov tables.")
    ] = 64,
    start_from: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint file, or exported draft folder, whose weights to start from; a run "
            "that goes on has its own."
        ),
    ] = None,
    texts: Annotated[int, typer.Option(min=1, max=65536, help="Texts per step.")] = 4,
    blocks: Annotated[int, typer.Option(min=1, max=65536, help="Anchors per text and step.")] = 64,
    rate: Annotated[float, typer.Option(callback=positive, help="Peak learning rate.")] = 1.2e-3,
    cross_entropy: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            callback=not_negative,
            help="Weight of the greedy answer's cross entropy; total variation gets the rest of 1.",
        ),
    ] = 0.1,
    cache_gb: Annotated[
        float, typer.Option(callback=positive, help="Disk for the target's features.")
    ] = 6.0,
    threads: Threads = 1,
) -> None:
    """Train the drafts; prints losses and held-out acceptance, saves often, resumes by itself."""
    import torch

    from sglang_ext.training.losses import LossWeights
    from sglang_ext.training.recipe import Recipe, Run
    from sglang_ext.training.train import Plan

    torch.set_num_threads(threads)
    _check_target(target)
    output_folder("--work", work)
    if start_from is not None and not start_from.exists():
        raise InputError(
            "--start-from", expected="a file or folder", found=start_from, remedy="Check the path."
        )
    chosen = tuple(drafts.split(","))
    if not set(chosen) <= {"dspark", "dflash"}:
        raise InputError(
            "--drafts",
            expected="dspark, dflash or both",
            found=drafts,
            remedy="As in dspark,dflash.",
        )
    if "dspark" not in chosen:
        refuse_without_effect(ctx, "with --drafts dflash", "--markov-rank")
    weights = LossWeights(cross_entropy=cross_entropy, total_variation=1 - cross_entropy)
    plan = Plan(minutes=minutes, texts=texts, blocks=blocks, learning_rate=rate, loss=weights)
    recipe = Recipe(
        drafts=chosen,
        layers=layers,
        gamma=gamma,
        draft_vocab=draft_vocab,
        markov_rank=markov_rank,
        cache_bytes=int(cache_gb * 1e9),
    )
    run = Run(target, work, recipe, plan, report=lambda line: _console.print(line, soft_wrap=True))
    run.trainer(start_from).run()


@app.command()
def evaluate(
    target: TargetPath,
    work: Work,
    draft: Annotated[Path, typer.Option("--draft", help="An exported draft checkpoint.")],
    threads: Threads = 1,
) -> None:
    """Measure an exported draft's acceptance length on the held-out answers."""
    import torch

    from sglang_ext.training.recipe import evaluate_exported

    torch.set_num_threads(threads)
    _check_target(target)
    _check_checkpoint("--draft", draft)
    _check_there("--work", work / "held_out", "train-draft generate --held-out")
    result = evaluate_exported(target, work, {draft.name: draft})[draft.name]
    _console.print(_acceptance_table(result))
    taus = {source: round(tally.tau, 3) for source, tally in result.by_source.items()}
    typer.echo(json.dumps({"all": round(result.total().tau, 3), **taus}))


@app.command()
def export(
    target: TargetPath,
    work: Work,
    out: Annotated[Path, typer.Option("--out", help="Directory; one folder per draft inside.")],
    threads: Threads = 1,
) -> None:
    """Write the trained drafts in the public checkpoint formats, with fitted STS temperatures."""
    import torch

    from sglang_ext.training.recipe import evaluate_exported, export_run

    torch.set_num_threads(threads)
    _check_target(target)
    _check_there("--work", work / "checkpoint.pt", "train-draft train")
    output_folder("--out", out)
    folders = export_run(target, work, out)
    results = evaluate_exported(target, work, folders)
    for name, result in results.items():
        if name == "dspark":
            _fit_sts(result, folders[name] / "sts.json")
        _console.print(f"{folders[name]}")
        _console.print(_acceptance_table(result))


def _fit_sts(result: Evaluation, path: Path) -> None:
    from sglang_ext.core.spec.calibration import fit_temperatures

    fitted = fit_temperatures(
        result.confidence, result.prefix_mask, dataset="held-out prompts, greedy answers"
    )
    fitted.save(path)


def _read_prompts(path: Path) -> list[Prompt]:
    from sglang_ext.training.prompts import read_prompts

    try:
        return read_prompts(path)
    except (OSError, ValueError) as error:
        raise InputError(
            "--prompts", expected="questions", found=error, remedy="Check the file."
        ) from error


def _check_target(path: Path) -> None:
    """Refuse what is no Llama checkpoint with a tokenizer before anything is loaded from it."""
    config = _check_checkpoint("--target", path)
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "num_hidden_layers"):
        if not isinstance(config.get(name), int):
            raise InputError(
                f"--target, config.json, {name}", expected="a whole number",
                found=config.get(name), remedy="Only Llama checkpoints can be trained for.",
            )  # fmt: skip
    for name in ("model.safetensors", "tokenizer.json"):
        _check_there("--target", path / name)


def _check_checkpoint(option: str, path: Path) -> dict[str, Any]:
    """The config.json of a checkpoint's folder."""
    _check_there(option, path / "config.json")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            f"{option}, config.json", expected="JSON", found=error, remedy="Check the checkpoint."
        ) from error
    if not isinstance(config, dict):
        raise InputError(
            f"{option}, config.json", expected="an object", found=type(config).__name__,
            remedy="Check the checkpoint.",
        )  # fmt: skip
    return config


def _check_there(option: str, path: Path, made_by: str = "") -> None:
    if not path.exists():
        remedy = f"Run sglang-ext {made_by} first." if made_by else "Check the path."
        raise InputError(option, expected=str(path), found="nothing there", remedy=remedy)


class _Progress:
    """Counts finished texts and says so every half minute."""

    def __init__(self, writer: ShardWriter) -> None:
        self._writer = writer
        self._start = self._told = time.monotonic()
        self._texts = self._tokens = 0

    def emit(self, text: Text) -> None:
        self._writer.add(text)
        self._texts += 1
        self._tokens += text.answer_length
        if time.monotonic() - self._told > 30:
            self._told = time.monotonic()
            self.tell()

    def tell(self) -> None:
        rate = self._tokens / max(1e-3, time.monotonic() - self._start)
        _console.print(f"{self._texts:,} texts, {self._tokens:,} answer tokens, {rate:.0f} tok/s")


def _answer_held_out(
    held: list[Prompt], target: Path, answer: int, progress: _Progress
) -> Generator:
    from transformers import AutoTokenizer

    from sglang_ext.training.generate import ChatFormat, Generator, Job, Limits
    from sglang_ext.training.target import Target

    # Loops are kept: a server would serve them too. Prompts beyond 2,000 tokens are left out.
    limits = Limits(prompt=2000, answer=answer, stop_loops=False)
    capacity = -(-(limits.prompt + answer) // 16) * 16
    jobs = [Job(prompt.text, prompt.kind, prompt.source) for prompt in held]
    chat = ChatFormat(AutoTokenizer.from_pretrained(target))
    model = Target(target, slots=32, capacity=capacity)
    return Generator(model, chat, iter(jobs), progress.emit, limits=limits)


def _answer_training(
    train: list[Prompt],
    held: list[Prompt],
    target: Path,
    slots: int,
    answer: int,
    seed: int,
    directory: Path,
    progress: _Progress,
) -> Generator:
    from transformers import AutoTokenizer

    from sglang_ext.training.corpus import DEFAULT_WEIGHTS, Corpus
    from sglang_ext.training.generate import ChatFormat, Generator, Limits
    from sglang_ext.training.shards import read_texts, shard_files
    from sglang_ext.training.target import Target

    limits = Limits(answer=answer)
    capacity = -(-(limits.prompt + answer) // 16) * 16
    chat = ChatFormat(AutoTokenizer.from_pretrained(target))
    # A resumed run draws other prompts than the run before it did.
    seed += 1000 * len(shard_files(directory))
    corpus = Corpus(train, held, DEFAULT_WEIGHTS, seed=seed)
    corpus.skip(chat.user_turn(text.tokens[: text.prompt_length]) for text in read_texts(directory))
    model = Target(target, slots=slots, capacity=capacity)
    return Generator(
        model, chat, corpus.jobs(), progress.emit, corpus.accept, limits=limits, seed=seed
    )


def _acceptance_table(result: Evaluation) -> Table:
    """tau and conditional acceptance per position, by source."""
    total = result.total()
    table = Table("set", "tau", "rounds", *(str(k + 1) for k in range(len(total.reached))))
    rows = [*sorted(result.by_source.items()), ("all", total)]
    for source, tally in rows:
        rates = (f"{rate:.3f}" for rate in tally.conditional)
        table.add_row(source, f"{tally.tau:.3f}", str(tally.rounds), *rates)
    return table
