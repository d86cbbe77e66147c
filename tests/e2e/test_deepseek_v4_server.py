"""A tiny DeepSeek-V4 behind a real server: equal to HF, however its requests arrive."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_ext.core.quant import dequantise_fp4, dequantise_fp8
from sglang_ext.tiny_model.deepseek_v4 import Quant, write
from tests.e2e.client import Client, Reply, greedy
from tests.e2e.stand import STEADY, Stand
from tests.e2e.workload import random_prompt
from tests.tiny import EOS

pytestmark = pytest.mark.e2e

# Ends before, at and behind the ends of CSA blocks (4) and HCA blocks (128).
LENGTHS = (1, 2, 3, 4, 5, 8, 61, 126, 127, 128, 129, 130, 255, 256, 257, 300)
PARAMS = greedy(12, ignore_eos=True)
Tensors = dict[str, Tensor]
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Window, window, CSA, HCA, CSA, HCA."""
    return write(tmp_path_factory.mktemp("v4") / "model")


def _client(
    stand: Stand, target: Path, *flags: object, env: Mapping[str, str] | None = None
) -> Client:
    return stand.server(stand.plain_spec(target, *flags, env=env)).client


def _prompts() -> list[list[int]]:
    return [random_prompt(n, 900 + n) for n in LENGTHS]


def _ids(replies: list[Reply]) -> list[list[int]]:
    return [reply.ids for reply in replies]


def _uncached(stand: Stand, target: Path) -> Client:
    return _client(stand, target, "--disable-overlap-schedule", "--disable-radix-cache")


@pytest.fixture(scope="module")
def expected(stand: Stand, target: Path) -> list[list[int]]:
    """Each prompt alone, in one piece, nothing cached."""
    client = _uncached(stand, target)
    return [client.generate(prompt, PARAMS).ids for prompt in _prompts()]


@pytest.mark.oracle
def test_greedy_ids_equal_transformers(target: Path, expected: list[list[int]]) -> None:
    from tests.oracle.v4 import hf_logits, load_hf

    hf = load_hf(target)
    for prompt, ids in zip(_prompts(), expected, strict=True):
        logits = hf_logits(hf, prompt + ids)
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids, len(prompt)


def test_sixteen_requests_at_once(stand: Stand, target: Path, expected: list[list[int]]) -> None:
    """Twice: the second time every prompt is a prefix hit, over slots used by others before."""
    client = _client(stand, target)
    client.batch([random_prompt(200, n) for n in range(8)], PARAMS)
    client.flush()
    assert _ids(client.batch(_prompts(), PARAMS)) == expected
    assert _ids(client.batch(_prompts(), PARAMS)) == expected


def _chunked(chunk: int) -> tuple[object, ...]:
    """Every other size with decoding requests in the same forwards."""
    mixed = ("--enable-mixed-chunk",) if chunk in (3, 7, 129) else ()
    return "--chunked-prefill-size", chunk, *mixed


@pytest.mark.parametrize("chunk", [1, 3, 5, 7, 127, 129])
def test_chunked_prefill(stand: Stand, target: Path, expected: list[list[int]], chunk: int) -> None:
    client = _client(stand, target, *_chunked(chunk))
    assert _ids(client.batch(_prompts(), PARAMS)) == expected


@pytest.mark.parametrize("chunk", [3, 5])
def test_aborts_inside_a_prompt(
    stand: Stand, target: Path, expected: list[list[int]], chunk: int
) -> None:
    """Between any two chunks; the next requests get the slots, and none is lost."""
    client = _client(stand, target, *_chunked(chunk))
    for n in range(3):
        client.flush()
        with ThreadPoolExecutor(1) as pool:
            gone = pool.submit(client.generate, random_prompt(1500, n), PARAMS, rid=f"gone-{n}")
            while client.load()["num_used_tokens"] < 150 * n + 1:
                assert not gone.done()
            client.abort(f"gone-{n}")
            assert gone.result().finish == "abort"
    assert _ids(client.batch(_prompts()[:8], PARAMS)) == expected[:8]
    assert client.settle() == 0


@dataclass(frozen=True)
class Branches:
    """A text (a prompt and its answer), and prompts that leave it behind token `cuts[i]`."""

    shared: list[int]
    whole: list[int]
    cuts: tuple[int, ...]
    prompts: list[list[int]]
    cold: list[list[int]]


@pytest.fixture(scope="module")
def branches(stand: Stand, target: Path) -> Branches:
    """At every offset up to behind the end of the second block of 128."""
    client, shared, rng = _uncached(stand, target), random_prompt(262, 1), random.Random(4)
    whole = shared + client.generate(shared, PARAMS).ids
    # The far ones first: what only they read may be evicted after.
    cuts = tuple(range(len(whole) - 1, 0, -1))
    prompts = [whole[:cut] + rng.choices(range(256), k=5) for cut in cuts]
    return Branches(shared, whole, cuts, prompts, _ids(client.batch(prompts, greedy(6))))


@pytest.mark.parametrize("page", [1, 4, 128])
def test_prefix_hits_at_every_offset(
    stand: Stand, target: Path, branches: Branches, page: int
) -> None:
    client = _client(stand, target, "--page-size", page)
    client.flush()
    shared = branches.shared
    assert client.generate(shared, PARAMS).ids == branches.whole[len(shared) :]
    warm = client.batch(branches.prompts, greedy(6))
    assert _ids(warm) == branches.cold
    for reply, cut in zip(warm, branches.cuts, strict=True):
        assert reply.meta["cached_tokens"] >= (cut - 1) // page * page, cut


def test_forced_retraction(stand: Stand, target: Path, expected: list[list[int]]) -> None:
    spec = stand.plain_spec(target, "--max-total-tokens", 1200, env=RETRACT)
    server = stand.server(spec)
    assert _ids(server.client.batch(_prompts(), PARAMS)) == expected
    assert "#retracted_reqs" in server.log()
    assert server.client.settle() == 0


def test_tensor_parallel(stand: Stand, target: Path, expected: list[list[int]]) -> None:
    client = _client(stand, target, "--tp-size", 2)
    assert _ids(client.batch(_prompts(), PARAMS)) == expected


def _varied(file: Path) -> Tensors:
    """Scales (ue8m0, an exponent each) that differ from layer to layer and block to block."""
    tensors = load_file(file)
    for number, name in enumerate(sorted(n for n in tensors if n.endswith(".scale"))):
        exponent = tensors[name].view(torch.uint8)
        block = torch.arange(exponent.numel()).view(exponent.shape)
        lower = 2 * ((block + number) % 3)
        tensors[name] = (exponent - lower).to(torch.uint8).view(tensors[name].dtype)
    save_file(tensors, file, metadata={"format": "pt"})
    return tensors


def _widened(tensors: Tensors) -> Tensors:
    plain = {}
    for name, value in tensors.items():
        scale = tensors.get(name.removesuffix("weight") + "scale")
        if name.endswith(".scale"):
            continue
        if scale is None:
            plain[name] = value
        elif value.element_size() == 1 and value.is_floating_point():
            plain[name] = dequantise_fp8(value, scale)
        else:
            plain[name] = dequantise_fp4(value, scale)
    return plain


# Heads wide enough that a matrix has more than one block of 128 rows.
WIDE_HEADS = {"num_attention_heads": 8, "index_head_dim": 32, "index_n_heads": 16}


@pytest.mark.parametrize("quant", ["fp8", "fp4"])
def test_quantised_checkpoint_equals_its_widened_weights(
    stand: Stand, tmp_path: Path, quant: Quant
) -> None:
    """The same weights once as stored, once widened by hand into a plain checkpoint.

    So do they with the draft of the checkpoint, which is quantised as well. Scales that are
    swapped, between layers or between blocks of a tensor, give other answers.
    """
    config = {"quant": quant, "mixing": 1.0, "with_dspark": True, **WIDE_HEADS}
    stored = write(tmp_path / "stored", **config)
    tensors = _varied(stored / "model.safetensors")
    wide = write(tmp_path / "wide", **config | {"quant": "none"})
    raw = json.loads((stored / "config.json").read_text())
    raw.pop("quantization_config")
    (wide / "config.json").write_text(json.dumps(raw))
    prompts = [random_prompt(n, n) for n in (3, 130, 61, 200)]

    def answers(path: Path, *flags: object) -> list[Reply]:
        return _client(stand, path, *flags, env=STEADY if flags else None).batch(prompts, PARAMS)

    def with_scales(changed: Tensors) -> list[list[int]]:
        save_file(_widened(tensors | changed), wide / "model.safetensors")
        spec = stand.plain_spec(wide)
        try:
            return _ids(stand.server(spec).client.batch(prompts, PARAMS))
        finally:
            stand.pool.drop(spec)

    expected = _ids(answers(stored))
    drafted = answers(stored, "--speculative-algorithm", "DSPARK")
    assert _ids(drafted) == expected
    assert sum(sum(reply.accepted) for reply in drafted) > 0
    assert with_scales({}) == expected
    if quant == "fp4":
        return  # the indexer's matrices are fp8 in both
    second, fourth = (f"layers.{n}.attn.indexer.wq_b.scale" for n in (2, 4))
    swapped = {second: tensors[fourth], fourth: tensors[second]}
    assert with_scales(swapped) != expected
    rolled = tensors[second].view(torch.uint8).roll(1, 0).view(tensors[second].dtype)
    assert with_scales({second: rolled}) != expected


REFUSED = [
    (("--enable-hierarchical-cache",), "--enable-hierarchical-cache: expected unset"),
    (("--disaggregation-mode", "prefill"), "--disaggregation-mode: expected unset"),
    (("--pp-size", 2), "--pp-size: expected unset"),
    (("--context-length", 4096), "(4096) is greater than the derived context_length (2048)"),
]


@pytest.mark.parametrize(("flags", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_options_that_cannot_be_honoured(
    stand: Stand, target: Path, flags: tuple[object, ...], message: str
) -> None:
    code, log, _ = stand.pool.launch_and_wait(stand.plain_spec(target, *flags))
    assert code != 0
    assert message in log


def test_truncated_weights_end_the_start(stand: Stand, tmp_path: Path) -> None:
    """Before a model is built."""
    path = write(tmp_path / "cut")
    file = path / "model.safetensors"
    size = file.stat().st_size
    os.truncate(file, size - 1000)
    code, log, _ = stand.pool.launch_and_wait(stand.plain_spec(path))
    assert code != 0
    assert f"model.safetensors: expected {size} bytes, found '{size - 1000} bytes'" in log
    assert "Load weight begin" not in log


def test_the_stop_token_ends_an_answer(stand: Stand, target: Path) -> None:
    reply = _client(stand, target).generate(random_prompt(5, 5), greedy(40))
    assert EOS not in reply.ids[:-1]
