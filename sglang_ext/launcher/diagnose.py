"""From the log of a server that did not start to its cause and the flag to change."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
    name: str
    pattern: re.Pattern[str]
    remedy: str


def _symptom(name: str, pattern: str, remedy: str) -> _Symptom:
    return _Symptom(name, re.compile(pattern, re.IGNORECASE), remedy)


# In order: what is listed first explains more than what follows it.
_SYMPTOMS = (
    _symptom(
        "port in use",
        r"address already in use|errno 98|port \d+ is (?:not available|already|in use)",
        "Another process listens there: use --port (SGLang takes further ports near it).",
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
        r"not enough memory.*mem-fraction|max_total_num_tokens|KV cache.*(?:<= 0|not enough)",
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
        "checkpoint missing",
        r"repository not found|couldn't connect to .*hugging|can't load the configuration|"
        r"no such file or directory: .*(?:config\.json|safetensors)|"
        r"incorrect path_or_model_id|repo id must be|is not a local folder|LocalEntryNotFound|"
        r"cannot find any model weights|outgoing traffic has been disabled",
        "Name a checkpoint that is there: --set model-path=DIRECTORY_OR_REPOSITORY.",
    ),
    _symptom(
        "library missing",
        r"ModuleNotFoundError|ImportError|cannot open shared object file",
        "A library is not installed here: `sglang-ext doctor` says which.",
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
        r"nccl error|DistNetworkError|Connection closed by peer",
        "Check --dist-init-addr, firewalls and NCCL_SOCKET_IFNAME; look for another rank's error.",
    ),
    _symptom(
        "refused by SGLang",
        r"^(?:ValueError|AssertionError|NotImplementedError): ",
        "SGLang's own words name the setting.",
    ),
)


def explain(log: str) -> Cause | None:
    """The cause that a log shows, or None when no line of it is known.

    The last line that matches counts: earlier ones may be warnings that were survived.
    """
    lines = log.splitlines()
    for symptom in _SYMPTOMS:
        for line in reversed(lines):
            if symptom.pattern.search(line):
                return Cause(symptom.name, line.strip()[:400], symptom.remedy)
    return None
