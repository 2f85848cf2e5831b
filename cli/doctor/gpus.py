"""Checks of GPUs: what the driver and PyTorch see, and whether GPUs reach each other's memory."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from cli.doctor.finding import Finding, ok, run_program, warning, wrong

_FIELDS = ("index", "name", "memory.total", "memory.used", "driver_version", "compute_cap")
_DRIVER_TIMEOUT_S = 8.0
_TORCH_TIMEOUT_S = 30.0
_MARK = "QUARTET-GPUS "
# In a process of its own: PyTorch's import takes seconds, and CUDA may hang or crash.
_ASK_TORCH = f"""
import json, torch
num = torch.cuda.device_count() if torch.cuda.is_available() else 0
peers = [[a == b or torch.cuda.can_device_access_peer(a, b) for b in range(num)] for a in range(num)]
print({_MARK!r} + json.dumps({{"version": torch.__version__, "cuda": torch.version.cuda, "peers": peers}}))
"""
_DEVICES = Path("/dev")
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
#: Links between GPUs, as `nvidia-smi topo -m` names them.
_SLOW_LINKS = {"SYS": "through both CPUs", "NODE": "through the CPU's PCIe bridges", "PHB": "through the CPU"}


@dataclass(frozen=True)
class Gpu:
    """One GPU, as ``nvidia-smi`` describes it."""

    index: int
    name: str
    total_mib: int
    used_mib: int
    driver: str
    capability: str


@dataclass(frozen=True)
class TorchView:
    """What PyTorch sees.

    Attributes:
        cuda: the CUDA that it was built for; ``None``: it was built without.
        peers: ``peers[a][b]``: GPU ``a`` reaches the memory of GPU ``b``.
    """

    version: str
    cuda: str | None
    peers: tuple[tuple[bool, ...], ...]


async def check_gpus() -> Sequence[Finding]:
    """The GPUs and, if there are any, what PyTorch sees of them and the links between them."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return [judge_absence(_devices())]
    query = f"--query-gpu={','.join(_FIELDS)}"
    run = await run_program([program, query, "--format=csv,noheader,nounits"], timeout_s=_DRIVER_TIMEOUT_S)
    if run.exit_code != 0:
        found = f"nvidia-smi {run.end}{run.last_words}"
        return [wrong("GPUs", found, "the driver is not loaded or hangs: see dmesg, restart the host")]
    gpus = parse_gpus(run.lines)
    if not gpus:
        return [ok("GPUs", "the driver knows of none: the engines `torch` (on the CPU) and `mock` run")]
    findings = [ok(f"GPU {gpu.index}", _described(gpu)) for gpu in gpus]
    if importlib.util.find_spec("torch") is not None:
        findings += await _torch(len(gpus))
    if len(gpus) > 1:
        links = await run_program([program, "topo", "-m"], timeout_s=_DRIVER_TIMEOUT_S)
        findings += judge_links(parse_links(links.lines, len(gpus)))
    return findings


def judge_absence(devices: Sequence[str]) -> Finding:
    """What a host without ``nvidia-smi``, but with these device files, means."""
    if devices:
        return warning(
            "GPUs",
            f"there is {devices[0]}, but no nvidia-smi",
            "in a container: start it with the NVIDIA container toolkit (--gpus all, capability `utility`)",
        )
    return ok("GPUs", "none (no nvidia-smi): the engines `torch` (on the CPU) and `mock` run")


def parse_gpus(lines: Sequence[str]) -> list[Gpu]:
    """The GPUs in ``nvidia-smi``'s table. Other lines are skipped; memory that a GPU does not report is 0."""
    gpus = []
    for line in lines:
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(_FIELDS) and cells[0].isdigit():
            total, used = (int(cell) if cell.isdigit() else 0 for cell in cells[2:4])
            gpus.append(Gpu(int(cells[0]), cells[1], total, used, cells[4], cells[5]))
    return gpus


def judge_torch(view: TorchView, num_gpus: int) -> list[Finding]:
    """Whether PyTorch sees all ``num_gpus`` GPUs, and whether the GPUs see each other."""
    num_seen = len(view.peers)
    if view.cuda is None:
        message = f"{view.version} is built without CUDA: the engine `torch` runs on the CPU here"
        return [warning("torch on GPUs", message, "install a build with CUDA from PyTorch's own index")]
    found = f"{view.version}, CUDA {view.cuda}, sees {num_seen} of {num_gpus} GPUs"
    if num_seen == 0:
        return [wrong("torch on GPUs", found, "its CUDA is newer than the driver, or CUDA_VISIBLE_DEVICES hides them")]
    findings = [ok("torch on GPUs", found)]
    apart = [f"{a}-{b}" for a, b in combinations(range(num_seen), 2) if not (view.peers[a][b] and view.peers[b][a])]
    if apart:
        advice = "between them all goes through host memory: pair prefill with decode on others, or see ACS and IOMMU"
        findings.append(warning("GPU peers", f"no access to each other's memory: {', '.join(apart)}", advice))
    elif num_seen > 1:
        findings.append(ok("GPU peers", f"all {num_seen} reach each other's memory"))
    return findings


def parse_links(lines: Sequence[str], num_gpus: int) -> dict[tuple[int, int], str]:
    """The link of each pair of GPUs, from the matrix of ``nvidia-smi topo -m``."""
    links = {}
    for line in lines:
        # nvidia-smi underlines the header, also where the output is no terminal.
        head, *cells = _ESCAPE.sub("", line).split() or [""]
        if head.startswith("GPU") and head[3:].isdigit() and len(cells) >= num_gpus:
            row = int(head[3:])
            links.update({(row, column): cells[column] for column in range(row + 1, num_gpus)})
    # The header has the form of a row; its links are the columns' names.
    return {pair: link for pair, link in links.items() if not link.startswith("GPU")}


def judge_links(links: dict[tuple[int, int], str]) -> list[Finding]:
    """How fast the links between GPUs are."""
    if not links:
        return []
    kinds = sorted(set(links.values()))
    slow = [kind for kind in kinds if kind in _SLOW_LINKS]
    found = f"between GPUs: {', '.join(kinds)}"
    if not slow:
        return [ok("GPU links", found)]
    pairs = ", ".join(f"{a}-{b}" for (a, b), kind in links.items() if kind in slow)
    advice = f"{pairs} go {_SLOW_LINKS[slow[-1]]}: share a model's layers, or pair prefill with decode, among others"
    return [warning("GPU links", found, advice)]


def _devices() -> list[str]:
    return sorted(str(path) for path in _DEVICES.glob("nvidia[0-9]*"))


async def _torch(num_gpus: int) -> list[Finding]:
    run = await run_program([sys.executable, "-c", _ASK_TORCH], timeout_s=_TORCH_TIMEOUT_S)
    for line in run.lines:
        if line.startswith(_MARK):
            found = json.loads(line.removeprefix(_MARK))
            return judge_torch(TorchView(found["version"], found["cuda"], tuple(map(tuple, found["peers"]))), num_gpus)
    found = f"asking PyTorch for the GPUs {run.end}{run.last_words}"
    return [wrong("torch on GPUs", found, "python -c 'import torch; torch.cuda.init()'")]


def _described(gpu: Gpu) -> str:
    memory = f"{gpu.used_mib / 1024:.1f} of {gpu.total_mib / 1024:.1f} GiB used"
    return f"{gpu.name}, {memory}, driver {gpu.driver}, compute capability {gpu.capability}"
