"""The comparison of offloading keeps what a step measured, whatever it tells beside numbers."""


def test_two_buffers_are_compared_with_one(monkeypatch):
    import offload

    def run_case(environment, depth=2, **case):
        numbers = {"ms": 100.0 if depth else 110.00049, "peak_gib": 9.0, "weights_gib": 5.0, "copies_ms": 40.0}
        shares = {"hidden_share": 0.9, "busy_ms": 99.0, "span_ms": 100.0, "first_step_s": 1.0}
        return {**numbers, **shares, "gpu": "H200", "steps": 3, "setting": {"shape": case["shape"], "depth": depth}}

    monkeypatch.setattr(offload, "run_case", run_case)
    (task,) = offload.tasks(["14b"], only="buffer")
    rows = [offload.row(*case, environment={}) for case in task]
    assert [(row["ms"], row["setting"]["depth"], row["steps"]) for row in rows] == [(100.0, 2, 3), (110.0, 0, 3)]
    assert offload.line(rows[0])["beside weights"] == "4.00"
    (gain,) = offload.gains(rows)
    assert gain == {"model": "qwen3-14b", "saved": "9.1%", "of the copies' time": "25%", "published": "6.7%"}
