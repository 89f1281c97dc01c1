"""Commands that another package registers."""

import sys

from batchformer.cli import main


def test_a_package_registers_a_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.py").write_text('HELP = "counts"\n\ndef run(args):\n    print("ran", *args)\n    return 3\n')
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[batchformer.commands]\ncount = mine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert main(["count", "a", "b"]) == 3
        assert capsys.readouterr().out == "ran a b\n"
        assert main(["count", "--help"]) == 0
        assert capsys.readouterr().out == "counts\n"
        assert main(["help"]) == 0
        assert "From other packages: count\n" in capsys.readouterr().out
        assert main(["coun"]) == 2
        assert "Did you mean count?" in capsys.readouterr().err
    finally:
        sys.modules.pop("mine", None)
