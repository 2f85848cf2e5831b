"""What an open stream takes of memory is measured on a face whose stub still is what the face asks for."""

from benchmarks import http_memory


async def test_all_streams_are_open_when_memory_is_measured() -> None:
    found = await http_memory._measure(20)
    assert found.num_streams == 20
    assert found.kib_after >= found.kib_before > 0
