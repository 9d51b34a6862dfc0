"""Memory that is kept: the system is asked for it once, not in every step."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys, torch
from maelm_hf.memory import keep_freed_memory

if sys.argv[1] == "kept":
    assert keep_freed_memory()
values = torch.ones(64 * 2**20 // 4)  # 64 MiB
for _ in range(10):
    values + 1
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    values + 1
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(how: str) -> int:
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_freed_memory_is_used_again_without_page_faults():
    assert page_faults("kept") < page_faults("default") / 100


def test_without_glibc_it_does_nothing_and_says_so(monkeypatch):
    from maelm_hf.memory import keep_freed_memory

    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert keep_freed_memory() is False
