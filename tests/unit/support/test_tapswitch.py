"""The cables of the tests' own network: late, lossy and slow as asked, and alike for equal seeds."""

from support.tapswitch import Cable, Gate


def test_a_cable_delays_a_frame() -> None:
    assert Gate(Cable(delay=0.02), "1").arrival(5.0, 1500) == 5.02


def test_a_cable_queues_frames_and_drops_frames_that_wait_too_long() -> None:
    gate = Gate(Cable(rate=1000.0, delay=1.0, queue=2.5), "1")
    assert [gate.arrival(0.0, 1000) for _ in range(5)] == [2.0, 3.0, 4.0, None, None]
    assert gate.late == 2
    assert gate.arrival(10.0, 500) == 11.5  # it has been idle: nothing is saved up


def test_a_cable_loses_its_share_of_frames_repeatably_by_seed() -> None:
    def lost(seed: str) -> list[bool]:
        gate = Gate(Cable(loss=0.01), seed)
        return [gate.arrival(0.0, 1) is None for _ in range(20_000)]

    assert lost("1") == lost("1") != lost("2")
    assert 150 <= sum(lost("1")) <= 250
