"""Several fleets of ``benchmarks.fuzz`` at once: what they found adds up, and the worst of each counts."""

from __future__ import annotations

from benchmarks.fuzz import Finding, Results, SurfaceFigures, merge
from benchmarks.fuzz_fleet import Memory, Stalls


def test_counts_of_fleets_add_up_and_the_worst_of_each_process_is_kept() -> None:
    stall = Finding(seed=2, surface="tcp", batch=3, what="stall", detail="router")

    both = merge([_part(1, stall_s=0.1, grown_mb=-5.0), _part(2, stall_s=0.3, grown_mb=20.0, findings=[stall])])

    assert both.seeds == [1, 2]
    assert both.inputs == 20
    assert both.inputs_per_s == 10.0
    assert both.surfaces == {"tcp": SurfaceFigures(inputs=20, calls=4, codes={"OK": 2}, inputs_per_s=14.0)}
    assert (both.num_findings, both.findings) == ({"stall": 1}, [stall])
    assert both.stalls == {"router": Stalls(longest_s=0.3, num_over=1)}
    assert (both.before["router"].private_mb, both.after["router"].private_mb) == (102.0, 122.0)


def _part(seed: int, *, stall_s: float, grown_mb: float, findings: list[Finding] | None = None) -> Results:
    before = 100.0 + seed
    return Results(
        seeds=[seed],
        inputs=10,
        inputs_per_s=5.0,
        surfaces={"tcp": SurfaceFigures(inputs=10, calls=2, codes={"OK": 1}, inputs_per_s=7.0)},
        num_findings={one.what: 1 for one in findings or []},
        findings=findings or [],
        stalls={"router": Stalls(longest_s=stall_s, num_over=len(findings or []))},
        before={"router": Memory(private_mb=before, num_files=1, num_threads=1)},
        after={"router": Memory(private_mb=before + grown_mb, num_files=1, num_threads=1)},
    )
