"""From the log of a server that did not start to its cause and the flag to change."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_ext.launcher.stages import STAGES


@dataclass(frozen=True)
class Cause:
    """Why a start failed.

    evidence: the line of the log that says so
    """

    name: str
    evidence: str
    remedy: str


@dataclass(frozen=True)
class _Symptom:
    """raised: it counts only as the end of a traceback"""

    name: str
    pattern: re.Pattern[str]
    remedy: str
    raised: bool


def _symptom(name: str, pattern: str, remedy: str, raised: bool = False) -> _Symptom:
    return _Symptom(name, re.compile(pattern, re.IGNORECASE), remedy, raised)


# In order: what is listed first explains more than what follows it.
_SYMPTOMS = (
    _symptom(
        "port in use",
        r"address already in use|errno 98|port \d+ is (?:not available|already|in use)",
        "Another process listens there: use --set port=N (SGLang takes further ports near it).",
    ),
    _symptom(
        "wrong flag",
        r"error: (?:unrecognized arguments|argument |ambiguous option|the following arguments)",
        "SGLang's parser refuses a flag: correct it after `--`, or in --set.",
    ),
    _symptom(
        "no draft",
        r"speculative-draft-model-path|this checkpoint has no draft|no draft (?:module|weights)",
        "Name a draft: --set speculative-draft-model-path=PATH, or drop --speculative-algorithm.",
    ),
    _symptom(
        "dispatch limit",
        r"num_max_dispatch_tokens|x\.size\(0\) <= |MAX_DISPATCH_TOKENS_PER_RANK",
        "A batch exceeds DeepEP's buffer: raise SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK "
        "(--set), or lower --max-running-requests.",
    ),
    _symptom(
        "not enough memory for the KV cache",
        r"not enough memory.*mem-fraction|KV cache.*(?:<= 0|not enough)",
        "Weights leave too little: raise --mem-fraction-static, or use more GPUs.",
    ),
    _symptom(
        "out of GPU memory",
        r"cuda out of memory|outofmemoryerror|cuda error: out of memory",
        "Lower --mem-fraction-static, --chunked-prefill-size or --cuda-graph-max-bs-decode.",
    ),
    _symptom(
        "out of host memory",
        r"cannot allocate memory|std::bad_alloc|oom-kill",
        "The machine's memory ran out: use fewer ranks or a smaller --max-total-tokens.",
    ),
    _symptom(
        "no room on a disk",
        r"no space left on device|errno 28\b|disk quota exceeded",
        "Free the disk of the path above, or name another: HF_HOME for checkpoints, TMPDIR, and "
        "--shm-size of a container for /dev/shm.",
    ),
    _symptom(
        "checkpoint not open to you",
        r"GatedRepoError|gated repo|access to model .* is restricted|\b40[13] client error",
        "Ask for access on the model's page, and set HF_TOKEN to a token of the account that has "
        "it; or name a directory: --set model-path=DIRECTORY.",
    ),
    _symptom(
        "no permission",
        r"permission denied|PermissionError|errno 13\b",
        "Give this user the right to the path or port above, or name another.",
    ),
    _symptom(
        "checkpoint missing",
        r"repository not found|couldn't connect to .*hugging|can't load the configuration|"
        r"no such file or directory: .*(?:config\.json|safetensors)|"
        r"incorrect path_or_model_id|repo id must be|is not a local folder|LocalEntryNotFound|"
        r"cannot find any model weights|outgoing traffic has been disabled",
        "Name a checkpoint that is there: --set model-path=DIRECTORY_OR_REPOSITORY.",
    ),
    _symptom(
        "library missing",
        r"^(?:ModuleNotFoundError|ImportError): |^OSError: .*cannot open shared object file",
        "A library is not installed here: `sglang-ext doctor` says which.",
        raised=True,  # other mentions are survived
    ),
    _symptom(
        "process killed",
        # This package's words for it, and SGLang's.
        r"killed by SIGKILL|(?:exit code:?|terminated with) -9\b",
        "Most often the machine's memory ran out (`dmesg` says so): use fewer ranks or a smaller "
        "--max-total-tokens.",
    ),
    _symptom(
        "other ranks unreachable",
        r"connection (?:refused|timed out).*dist|timed out.*(?:rendezvous|TCPStore)|"
        r"DistStoreError|clients joined|nccl error|ncclSystemError|DistNetworkError|"
        r"Connection closed by peer",
        "Check --dist-init-addr, firewalls and NCCL_SOCKET_IFNAME; look for another rank's error "
        "(--set NCCL_DEBUG=WARN says more).",
    ),
    _symptom(
        "refused by SGLang",
        r"^(?:ValueError|AssertionError|NotImplementedError): ",
        "SGLang's own words name the setting.",
    ),
)


def explain(log: str) -> Cause | None:
    """The cause that a log shows, or None when no line of it is known.

    What was survived is left out. The last line that matches counts.
    """
    lines = list(_relevant(log.splitlines()))
    for symptom in _SYMPTOMS:
        for line, is_raised in reversed(lines):
            if symptom.pattern.search(line) and (is_raised or not symptom.raised):
                return Cause(symptom.name, line.strip()[:400], symptom.remedy)
    return None


_PROGRESS = re.compile("|".join(mark for mark, _ in STAGES))
_UP = re.compile(STAGES[-1][0])
# SGLang's words for what ends a process; another rank may get further before it hears of it.
_FATAL = re.compile(r"hit an exception: Traceback")
_STAMPED = re.compile(r"\[\d{4}-")


def _relevant(lines: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Lines after the last sign of progress, and of fatal exceptions before it; none from before
    the server was up, once it was. With each: whether it ends a traceback.
    """
    up = max((at for at, line in enumerate(lines) if _UP.search(line)), default=-1)
    end = max((at for at, line in enumerate(lines) if _PROGRESS.search(line)), default=-1)
    fatal, before = False, ""
    for at, line in enumerate(lines):
        if _STAMPED.match(line):
            fatal = _FATAL.search(line) is not None
        if at > end or (fatal and at > up):
            yield line, before.startswith("  ") and not line.startswith(" ")
        before = line
