import runpy


def test_quickstart_runs_and_says_what_it_learned(capsys):
    ran = runpy.run_module("examples.quickstart", run_name="__main__")
    out = capsys.readouterr().out
    assert "bags(ids)['user'] is [2, 16]" in out
    assert "3 items" in out
    assert ran["loss"] < 0.5
