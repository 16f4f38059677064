"""Scripts that complete words of `fedjax-het`, executed by bash, zsh and fish."""

import shutil
import subprocess

import pytest

from fedjax_het.cli import main

RUN = {
    "bash": """
source {script}
while read -ra COMP_WORDS; do
  [[ ${{COMP_WORDS[-1]}} == EMPTY ]] && COMP_WORDS[-1]=
  COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
  _fedjax_het 2> /dev/null
  echo "${{COMPREPLY[@]}}"
done
""",
    # Functions of zsh that take the candidates.
    "zsh": """
compdef() {{ }}
compset() {{ words[CURRENT]=${{words[CURRENT]#*=}} }}
compadd() {{ shift; print -r -- ${{(M)@:#${{words[CURRENT]}}*}} }}
_files() {{ print -r -- ${{words[CURRENT]}}*(N) }}
source {script}
while read -r line; do
  words=(${{=line}}) CURRENT=${{#words}}
  [[ $words[-1] == EMPTY ]] && words[-1]=""
  _fedjax_het
done
""",
    "fish": """
source {script}
while read -l line
  echo (complete -C (string replace EMPTY "" $line) | string split -f1 \\t)
end
""",
}
CASES = {
    "ru": "run",
    "desc": "describe",
    "run --held": "--held-out-clients --held-out-epochs",
    "run --no-": "--no-keep-state",
    "run --algorithm fedprox": "fedprox fedprox_ft",
    "run --algorithm fedprox --algo": "--algorithm",
    "run --metrics fai": "fairness",
    "run --metrics fairness dri": "drift",
    "run --protocol st": "standard",
    "run --local-optimizer adamw": "adamw",
    "run --normalization uni": "unit",
    "run --client-state spl": "split",
    "run --client-tests EMPTY": "false true",
    "run --precision tf": "tf32",
    "run --track tens": "tensorboard",
    "run --config res": "results.yaml",
    "run --alpha EMPTY": "",
    "sweep --algorithm fedavg fedprox": "fedprox fedprox_ft",
    "sweep --algorithm fedavg --prot": "--protocol",
    "sweep --launcher EMPTY": "here ray",
    "list methods parti": "partitions",
    "show fedprox dirichlet_c": "dirichlet_capped",
    "describe fedam": "fedamp",
    "table fedaf.table1": "fedaf.table1",
    "table table1 --preset EMPTY": "cpu paper quick",
    "table table1 --methods fedprox": "fedprox fedprox_ft",
    "report res": "results.yaml",
    "report results.yaml --metric best": "best_accuracy",
    "export results.yaml --mod": "--model",
}


@pytest.mark.parametrize("shell", RUN)
def test_shell_completes_words(shell, tmp_path, capsys):
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    script = tmp_path / "script"
    assert main(["--tyro-write-completion", shell, str(script)]) == 0
    assert main(["--tyro-print-completion", shell]) == 0
    assert capsys.readouterr().out == script.read_text()
    (tmp_path / "results.yaml").touch()
    options = {"bash": ["--norc"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    done = subprocess.run(
        [shell, *options, "-c", RUN[shell].format(script=script)],
        input="".join(f"fedjax-het {words}\n" for words in CASES),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    lines = [" ".join(sorted(line.split())) for line in done.stdout.split("\n")]
    assert dict(zip(CASES, lines, strict=False)) == CASES, done.stderr


def test_value_after_equals_sign(tmp_path, capsys):
    """Bash splits a word at the sign."""
    assert main(["--tyro-print-completion", "bash"]) == 0
    script = f"""{capsys.readouterr().out}
COMP_WORDS=(fedjax-het run --algorithm = fedprox) COMP_CWORD=4
_fedjax_het; echo "${{COMPREPLY[@]}}"
"""
    if shutil.which("bash") is None:
        pytest.skip("needs bash")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "fedprox fedprox_ft\n"


def test_completion_rejects_bad_words(tmp_path, capsys):
    path = tmp_path / "nowhere" / "script"
    assert main(["--tyro-write-completion", "bash", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedjax-het: --tyro-write-completion = '{path}': expected a file")
