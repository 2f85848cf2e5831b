"""``deploy/bench.sh``: the command that its eleven arguments make, and what it refuses."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.cli.conftest import RunCli, run_cli, start_router
from tests.client.conftest import StartRouter
from tests.client.fake_router import FakeRouter

__all__ = ["run_cli", "start_router"]

SCRIPT = Path(__file__).parents[2] / "deploy" / "bench.sh"
DEFAULTS = {
    "--wait": "300",
    "--sweep": "1,2,4,8",
    "--rounds": "8",
    "--out": "bench_logs",
    "--prompt-tokens": "820-1024",
    "--output-tokens": "103-128",
}


def run_script(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it in ``directory``, with a ``quartet`` that prints its arguments, each on a line."""
    program = directory / "bin" / "quartet"
    program.parent.mkdir(exist_ok=True)
    program.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        [SCRIPT, *arguments], cwd=directory, env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60
    )


def options(directory: Path, *arguments: str) -> tuple[dict[str, str], list[str]]:
    """The options of the command that the script runs, and its labels."""
    done = run_script(directory, *arguments)
    assert done.returncode == 0, done.stderr
    command, *words = done.stdout.splitlines()
    assert command == "bench"
    pairs = list(zip(words[::2], words[1::2], strict=True))
    labels = [value for name, value in pairs if name == "--label"]
    return {name: value for name, value in pairs if name != "--label"}, labels


def test_the_eleven_arguments_are_taken_in_their_order(tmp_path: Path) -> None:
    arguments = ("m", "5", "2", "1 4 16", "true", "out", "12", "/models/m", "2000", "100", "wide_ep")
    given, labels = options(tmp_path, *arguments)
    lengths = {"--prompt-tokens": "1600-2000", "--output-tokens": "80-100"}
    rest = {"--wait": "300", "--sweep": "1,2,8,32", "--rounds": "5", "--out": "out", "--model": "m"}
    assert given == lengths | rest
    assert labels == ["kind=wide_ep", "total_gpus=12", "model_path=/models/m"]


@pytest.mark.parametrize("arguments", [("m",), ("m", *[""] * 10)])
def test_what_is_left_out_or_empty_takes_its_default(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    assert options(tmp_path, *arguments) == (DEFAULTS | {"--model": "m"}, ["kind=disagg"])


def test_logs_are_taken_where_there_are_some(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    arguments = ("", "", "", "1,2", "", "out")
    assert "no *.log in out" in run_script(tmp_path, *arguments).stderr
    (tmp_path / "out" / "decode-0.log").touch()
    given, _ = options(tmp_path, *arguments)
    assert given == DEFAULTS | {"--sweep": "1,2", "--out": "out", "--log-dir": "out"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "MODEL is missing"),
        (("m", "0"), "MULTI_ROUND must be a whole number from 1 on, not '0'"),
        (("m", "1", "x"), "NUM_GEN_SERVERS must"),
        (("m", "1", "1", "1 2k"), "CONCURRENCY_LIST must be a whole number from 1 on, not '2k'"),
        (("m", "1", "1", "1", "false"), "STREAMING must be true, not 'false'"),
        (("m", "1", "1", "1", "true", "out", "-1"), "TOTAL_GPUS must"),
        (("m", "1", "1", "1", "true", "out", "1", "path", "1.5"), "ISL must"),
        (("m", "1", "1", "1", "true", "out", "1", "path", "1", "no"), "OSL must"),
        (("m", "1", "1", "1", "2", "4", "true", "out", "1", "path", "1", "1", "agg"), "13 arguments"),
    ],
)
def test_what_it_cannot_take_is_refused_with_the_usage(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    done = run_script(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"bench.sh: {message}")
    assert "usage: bench.sh MODEL [MULTI_ROUND" in done.stderr


def test_without_quartet_on_the_path_that_of_the_checkout_runs(tmp_path: Path) -> None:
    script, own = tmp_path / "deploy" / "bench.sh", tmp_path / ".venv" / "bin" / "quartet"
    script.parent.mkdir()
    shutil.copy(SCRIPT, script)

    def run() -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(("/usr/bin", "/bin"))
        return subprocess.run(
            [script, "m"], env={"PATH": path}, capture_output=True, text=True, check=False, timeout=60
        )

    missing = run()
    assert (missing.returncode, missing.stdout) == (1, "")
    assert "no quartet on the PATH" in missing.stderr and "make setup" in missing.stderr
    own.parent.mkdir(parents=True)
    own.write_text('#!/bin/sh\necho mine "$1"\n')
    own.chmod(0o755)
    assert run().stdout == "mine bench\n"


async def test_the_command_is_one_that_quartet_takes(
    tmp_path: Path, run_cli: RunCli, start_router: StartRouter
) -> None:
    done = run_script(tmp_path, "tiny", "2", "1", "1 2", "true", str(tmp_path / "out"), "1", "", "10", "3", "agg")
    # The fake router says of no server that it serves, so it can't be waited for.
    command = [word for word in done.stdout.splitlines() if word not in ("--wait", "300")]
    result = await run_cli(*command, "--warmup", "0", "--router", await start_router(FakeRouter()))
    assert result.exit_code == 0, result.output
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        *("bench.json", "deployment.json", "concurrency_1", "concurrency_2")
    }
