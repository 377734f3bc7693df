from jaxglue.generation.config import SamplingConfig
from jaxglue.generation.pages import CachePlan
from jaxglue.generation.scheduler import Answer, Request, Scheduler


def test_a_window_begins_with_the_longest_answers():
    plan = CachePlan(slots=4, pages=64, table=16, bytes=0)
    scheduler = Scheduler(plan, 8)
    lengths = [5, 300, 70, 9, 200]  # the last one waits for a slot
    requests = [Request([1] * length, SamplingConfig(max_tokens=8 if length == 70 else 100)) for length in lengths]
    scheduler.add(
        [Answer(i, 0, request, len(request.prompt) + request.sampling.max_tokens) for i, request in enumerate(requests)]
    )
    windows = [scheduler.next() for _ in range(2)]
    assert [[len(answer.request.prompt) for answer in work.answers] for work in windows] == [
        [300, 70, 9, 5],
        [300, 200, 9, 5],
    ]
