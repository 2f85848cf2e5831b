"""Checks of what hand-offs of GPUs need: memory that other GPUs and processes reach, and pinned memory of the host.

Every question goes to a process of its own (``gpu_probe``), because CUDA may hang a process or end it. A process that
tries something sees its own GPU only, as a worker of ``quartet up`` does whose topology says ``gpus``.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from cli.doctor.finding import Finding, ProgramRun, Start, Verdict, ok, run_program, started, warning, wrong
from cli.doctor.gpu_probe import MARK, PINNED, SHARED, WRITE_COMBINED
from cli.doctor.machine import size
from quartet.transfer.cuda.kernel_copies import num_programs

_PROBE = (sys.executable, "-m", "cli.doctor.gpu_probe")
_PROBE_TIMEOUT_S = 30.0
_GPUS_VARIABLE = "CUDA_VISIBLE_DEVICES"
_NO_GPU = ("no CUDA driver", "CUDA_ERROR_NO_DEVICE")
_MODULE_VERSION = Path("/proc/driver/nvidia/version")
_SEED_BITS = 32
_NOT_TRIED = "not tried"

_STAGED = "hand-offs between them go through pinned host memory (staged), which takes longer"
_WRONG_BYTES = "hand-offs here would bring wrong blocks: leave cuda_ipc out of transfer.ways; see dmesg"
_PREFILLS = "the router prefills where it decodes"
_NO_KERNEL = "the copy engine pulls blocks, slower if they are small; pip install 'quartet[cuda]' brings Triton"
_LOCKED = "what the kernel lets a process lock shows in `ulimit -l`"


async def check_hand_offs(
    *,
    timeout_s: float,
    on_progress: Callable[[str], None] = lambda _text: None,
    start: Start = started,
) -> list[Finding]:
    """Try it on every GPU and every pair of them. What is not tried within ``timeout_s`` seconds is a finding."""
    bindings = _installed("cuda-bindings")
    findings, probes = [judge_bindings(bindings)], Probes(timeout_s, start)
    if bindings is not None:
        return [*findings, *await _check_gpus(probes, on_progress)]
    return [*findings, judge_triton(await probes.ask("triton"))]


@dataclass(frozen=True)
class Survey:
    """What the driver says of the GPUs.

    Attributes:
        cuda: the newest CUDA that the driver speaks.
        size_bytes: all memory of each GPU.
        peers: ``peers[a][b]``: GPU ``a`` reaches the memory of GPU ``b``.
    """

    cuda: str
    names: Sequence[str]
    size_bytes: Sequence[int]
    peers: Sequence[Sequence[bool]]

    @classmethod
    def of(cls, finding: Mapping[str, Any]) -> Survey:
        """What ``gpu_probe.survey`` found."""
        return cls(finding["cuda"], finding["names"], finding["size_bytes"], finding["peers"])


@dataclass(frozen=True)
class Answer:
    """What a probe found out.

    Attributes:
        findings: as ``gpu_probe`` printed them; at least one where nothing failed.
        failure: why there are no more, in words; empty: nothing failed.
        name: the driver's name for it, if it was the driver that refused; or that there was no time for it.
    """

    findings: Sequence[Mapping[str, Any]] = ()
    failure: str = ""
    name: str = ""


class Probes:
    """Starts probes, each for a bounded time, and all of them."""

    def __init__(self, timeout_s: float, start: Start = started) -> None:
        """Have all probes end within ``timeout_s`` seconds from now."""
        self._start = start
        self._timeout_s = timeout_s
        self._deadline = asyncio.get_running_loop().time() + timeout_s

    async def ask(self, *arguments: str, gpu: int | None = None) -> Answer:
        """Run a probe that sees only this GPU; ``None``: all."""
        left = self._left()
        if left <= 0:
            return self._too_late()
        run = await run_program([*_PROBE, *arguments], timeout_s=left, variables=_only(gpu), start=self._start)
        return answer(run)

    @asynccontextmanager
    async def lending(self, gpu: int, seed: int) -> AsyncIterator[Answer]:
        """Run a probe that lends memory of this GPU during the block; its answer has the ``handle``."""
        left = self._left()
        if left <= 0:
            yield self._too_late()
            return
        lines: list[str] = []
        has_said = asyncio.Event()

        def on_line(line: str) -> None:
            lines.append(line)
            if _found((line,)):
                has_said.set()

        async with self._start([*_PROBE, "lend", str(seed)], _only(gpu), on_line) as program:
            ends = asyncio.ensure_future(program.wait())
            says = asyncio.ensure_future(has_said.wait())
            try:
                await asyncio.wait({ends, says}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                # One that still runs has said its handle, and one that ended has not: how it ended says why.
                code = ends.result() if ends.done() else 0 if has_said.is_set() else None
                yield answer(ProgramRun(code, tuple(lines)))
            finally:
                ends.cancel()
                says.cancel()

    def _left(self) -> float:
        return min(_PROBE_TIMEOUT_S, self._deadline - asyncio.get_running_loop().time())

    def _too_late(self) -> Answer:
        return Answer(failure=f"not tried: the {self._timeout_s:g} s were over", name=_NOT_TRIED)


def answer(run: ProgramRun) -> Answer:
    """What the probe said before it ended."""
    findings = _found(run.lines)
    if findings and "error" in findings[-1] and "name" in findings[-1]:
        *rest, refused = findings
        return Answer(tuple(rest), refused["error"], refused["name"])
    if run.exit_code != 0 or not findings:
        steps = [said["at"] for said in _said(run.lines) if "at" in said]
        where = f" while {steps[-1]}" if steps else ""
        words = [line for line in run.lines if not line.startswith(MARK)]
        return Answer(tuple(findings), ": ".join([f"the process that tried it {run.end}{where}", *words[-1:]]))
    return Answer(tuple(findings))


def judge_bindings(found: str | None) -> Finding:
    """Whether Quartet can call the driver: the version of the package, or ``None``."""
    if found is None:
        missing = "not installed: Quartet can't call the driver, and no pool on a GPU can be had"
        return wrong("cuda-bindings", missing, "pip install 'quartet[cuda]'")
    return ok("cuda-bindings", found)


def judge_no_survey(seen: Answer) -> Finding:
    """What it means that the driver says nothing of GPUs."""
    if seen.name in _NO_GPU:
        return _no_gpus(seen.failure)
    return wrong("GPUs", f"the driver could not be asked: {seen.failure}", "see the kernel's log (dmesg), nvidia-smi")


def judge_gpus(survey: Survey, driver_version: str) -> list[Finding]:
    """The GPUs there are."""
    driver = f"driver {driver_version}, " if driver_version else ""
    return [
        ok(f"GPU {number}", f"{name}, {size(size_bytes)}, {driver}CUDA up to {survey.cuda}")
        for number, (name, size_bytes) in enumerate(zip(survey.names, survey.size_bytes, strict=True))
    ]


def judge_peers(survey: Survey) -> Finding:
    """Which GPUs reach each other's memory."""
    numbers = range(len(survey.names))
    apart = [f"{a}-{b}" for a in numbers for b in numbers if a < b and not _are_peers(survey, a, b)]
    if apart:
        return warning("GPU peers", f"can't reach each other's memory: {', '.join(apart)}", _STAGED)
    if len(numbers) == 1:
        return ok("GPU peers", "one GPU: Prefill and Decode share it")
    return ok("GPU peers", f"all {len(numbers)} reach each other's memory")


def judge_pieces(gpu: int, answers: Mapping[int, Answer]) -> list[Finding]:
    """How fast pieces came to ``gpu``, by the copy engine and by the kernel."""
    check, parts, wrongs, failures = f"pieces to {gpu}", list[str](), list[str](), list[str]()
    for source, found in answers.items():
        pieces = found.findings[1:]
        if pieces:
            engine = ", ".join(f"{piece['copies']:.0f}" for piece in pieces)
            kernel = ", ".join(f"{piece['kernel']:.0f}" for piece in pieces if "kernel" in piece)
            parts.append(f"{_named(source, gpu)} {engine}" + (f"; by the kernel {kernel}" if kernel else ""))
        if any(piece.get("is_right") is False for piece in pieces):
            wrongs.append(f"{_named(source, gpu)}: the kernel brought other bytes than were lent")
        if found.findings and found.failure:
            failures.append(f"{_named(source, gpu)}: {found.failure}")
    findings = []
    if parts:
        sizes = " and ".join(
            _piece_size(piece["piece"]) for piece in max((a.findings[1:] for a in answers.values()), key=len)
        )
        findings.append(ok(check, f"of {sizes}, GB/s: {' | '.join(parts)}"))
    findings += [wrong(check, message, _WRONG_BYTES) for message in wrongs]
    return findings + [warning(check, message, "the kernel or Triton fails there; see dmesg") for message in failures]


def judge_pulls(gpu: int, survey: Survey, answers: Mapping[int, Answer]) -> list[Finding]:
    """What a process on ``gpu`` got from processes on others and on ``gpu`` itself."""
    check, findings = f"hand-offs to {gpu}", list[Finding]()
    came = {source: _rate_of(found) for source, found in answers.items()}
    rates = [f"{_named(source, gpu)} {rate:.0f} GB/s" for source, rate in came.items() if rate is not None]
    if rates:
        findings.append(ok(check, f"another process's memory opens and comes right (cuda_ipc): {', '.join(rates)}"))
    for source, found in answers.items():
        if came[source] is not None:
            continue
        why = found.failure or "the bytes that came are not those that were lent"
        message = f"{_named(source, gpu)}: {'' if found.name == _NOT_TRIED else 'not possible: '}{why}"
        if not _are_peers(survey, gpu, source):
            findings.append(warning(check, message, _STAGED))
        else:
            findings.append(wrong(check, message, _advice(found) if found.failure else _WRONG_BYTES))
    return findings


def judge_host(gpu: int, found: Answer) -> Finding:
    """How fast the GPU and the host's memory exchange bytes, as in hand-offs by ``staged``, not by ``cuda_ipc``."""
    check = f"host, GPU {gpu}"
    kinds = {finding["kind"]: finding for finding in found.findings}
    parts = [_host_part(kind, kinds[kind]) for kind in (PINNED, WRITE_COMBINED, SHARED) if kind in kinds]
    if found.failure:
        parts.append(found.failure)
    message = "; ".join(parts)
    if any("error" not in finding and not finding["is_right"] for finding in kinds.values()):
        return wrong(check, message, "hand-offs by staged would bring wrong blocks: see dmesg, and use another GPU")
    if all("is_right" in kinds.get(kind, {}) for kind in (PINNED, WRITE_COMBINED, SHARED)):
        return ok(check, message)
    if found.failure:
        return warning(check, message, _advice(found) if found.name == _NOT_TRIED else f"staged may fail; {_LOCKED}")
    return warning(check, message, _without({kind for kind, finding in kinds.items() if "error" in finding}))


def judge_triton(found: Answer) -> Finding:
    """Whether Triton compiles the kernel that pulls blocks, and whether that copies right."""
    if not found.findings:
        advice = _advice(found) if found.name == _NOT_TRIED else _NO_KERNEL
        return warning("Triton", f"no kernel pulls blocks: {found.failure}", advice)
    compiled, *ran = found.findings
    message = f"{compiled['version']}, compiles the kernel that pulls blocks, for sm_{compiled['architecture']}"
    if "no_gpu" in compiled:
        return ok("Triton", f"{message}; there is no GPU to run it on")
    message += f" in {compiled['compile_s']:.1f} s"
    if not ran:
        return warning("Triton", f"{message}, but it does not run: {found.failure}", _NO_KERNEL)
    if not ran[0]["is_right"]:
        return wrong("Triton", f"{message}, but it copies other bytes than were there", _WRONG_BYTES)
    return ok("Triton", f"{message}; it copies right")


async def _check_gpus(probes: Probes, on_progress: Callable[[str], None]) -> list[Finding]:
    on_progress("asking the driver")
    seen = await probes.ask("survey")
    survey = None if seen.failure else Survey.of(seen.findings[0])
    on_progress("compiling with Triton")
    triton = judge_triton(await probes.ask("triton", gpu=0 if survey is not None and survey.names else None))
    if survey is None:
        return [judge_no_survey(seen), triton]
    if not survey.names:
        return [_no_gpus("the driver knows of none"), triton]
    findings = [*judge_gpus(survey, _driver_version()), judge_peers(survey)]
    findings += await _pulls(probes, survey, on_progress, has_kernel=triton.verdict is Verdict.OK)
    for gpu in range(len(survey.names)):
        on_progress(f"copying between GPU {gpu} and the host's memory")
        findings.append(judge_host(gpu, await probes.ask("host", gpu=gpu)))
    return [*findings, triton]


def _found(lines: Sequence[str]) -> list[dict[str, Any]]:
    """The findings among a probe's lines."""
    return [said for said in _said(lines) if "at" not in said]


def _said(lines: Sequence[str]) -> list[dict[str, Any]]:
    """Its findings, and the steps that it began."""
    return [said for line in lines if line.startswith(MARK) and (said := _parsed(line)) is not None]


def _parsed(line: str) -> dict[str, Any] | None:
    """What the line says; ``None``: its process was ended in the middle of it."""
    try:
        found: dict[str, Any] = json.loads(line.removeprefix(MARK))
    except ValueError:
        return None
    return found


async def _pulls(
    probes: Probes, survey: Survey, on_progress: Callable[[str], None], *, has_kernel: bool
) -> list[Finding]:
    """Have every GPU lend to every GPU, itself included, one at a time: together they would measure each other."""
    numbers = range(len(survey.names))
    answers: dict[int, dict[int, Answer]] = {gpu: {} for gpu in numbers}
    for source in numbers:
        seed = secrets.randbits(_SEED_BITS)
        async with probes.lending(source, seed) as lent:
            for gpu in sorted(numbers, key=lambda number: number != source):
                on_progress(f"from GPU {source} to GPU {gpu}")
                if lent.failure:
                    answers[gpu][source] = lent
                    continue
                num = num_programs(is_same_gpu=gpu == source, is_busy=False) if has_kernel else 0
                handle = lent.findings[0]["handle"]
                answers[gpu][source] = await probes.ask("open", handle, str(seed), str(num), gpu=gpu)
    findings: list[Finding] = []
    for gpu in numbers:
        findings += [*judge_pulls(gpu, survey, answers[gpu]), *judge_pieces(gpu, answers[gpu])]
    return findings


def _are_peers(survey: Survey, a: int, b: int) -> bool:
    return survey.peers[a][b] and survey.peers[b][a]


def _rate_of(found: Answer) -> float | None:
    """GB/s; ``None``: the bytes did not come, or came wrong."""
    if not found.findings or not found.findings[0]["is_right"]:
        return None
    return float(found.findings[0]["gb_s"])


def _named(source: int, gpu: int) -> str:
    return "from itself" if source == gpu else f"from {source}"


def _advice(found: Answer) -> str:
    if found.name == _NOT_TRIED:
        return "give it longer with --timeout"
    if found.name == "CUDA_ERROR_OUT_OF_MEMORY":
        return "free some of the GPU's memory and try again: see nvidia-smi for who has it"
    return (
        "hand-offs here go through host memory (staged), which takes longer; in containers, share network, IPC and PID "
        "namespaces; see dmesg"
    )


def _without(refused: Collection[str]) -> str:
    """What follows where the driver refuses these kinds of the host's memory."""
    if {PINNED, WRITE_COMBINED} <= set(refused):
        return f"cuda_ipc is the only way from and to this GPU: for CPUs, other hosts, {_PREFILLS}; {_LOCKED}"
    if SHARED in refused:
        return f"blocks leave this GPU by cuda_ipc only: for CPUs, other hosts, {_PREFILLS}; {_LOCKED}"
    return f"none fail: copies to this GPU go through {PINNED if WRITE_COMBINED in refused else WRITE_COMBINED} memory"


def _host_part(kind: str, finding: Mapping[str, Any]) -> str:
    if "error" in finding:
        return f"{kind}: not possible: {finding['error']}"
    if not finding["is_right"]:
        return f"{kind}: other bytes came than were written"
    return f"{kind} {finding['to_host']:.0f} GB/s to the host, {finding['from_host']:.0f} from it"


def _piece_size(size_bytes: int) -> str:
    return f"{size_bytes / (1 << 20):g} MiB" if size_bytes >= 1 << 20 else f"{size_bytes / (1 << 10):g} KiB"


def _no_gpus(why: str) -> Finding:
    hidden = os.environ.get(_GPUS_VARIABLE)
    message = f"none: {why}" + (f"; {_GPUS_VARIABLE} is {hidden!r}" if hidden is not None else "")
    advice = "no hand-off by cuda_ipc here; Prefill and Decode workers on CPUs need no GPU (`quartet doctor`)"
    return wrong("GPUs", message, advice)


def _only(gpu: int | None) -> dict[str, str]:
    """The variable by which a process sees only this one of the GPUs that we see."""
    if gpu is None:
        return {}
    seen = os.environ.get(_GPUS_VARIABLE, "").split(",")
    return {_GPUS_VARIABLE: seen[gpu].strip() if gpu < len(seen) and seen[0] else str(gpu)}


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver_version(file: Path = _MODULE_VERSION) -> str:
    """The version of the kernel's module; empty: it can't be read here."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)*\b", text)
    return found[0] if found else ""
