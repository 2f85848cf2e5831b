"""`SchedulingParams`: the rank of attention DP that a request shall go to."""

from __future__ import annotations

from tensorrt_llm._stand_in.schema import Unslotted, make_dataclass

SchedulingParams = make_dataclass("SchedulingParams", Unslotted, kw_only=False)
