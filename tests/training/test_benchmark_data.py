"""The benchmark of the data reads real memory and counts what batches really hold."""

import sys

import numpy as np
import pytest

from training.benchmark_data import data_recipe, epoch_size, watch, write_corpus


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_a_process_is_watched_from_outside(tmp_path):
    """300 MB of its own at the peak, given back before the end; and a file of 100 MB, mapped and read."""
    file = tmp_path / "mapped.npy"
    np.lib.format.open_memmap(file, mode="w+", dtype=np.uint8, shape=(100 * 2**20,))[:] = 1
    script = (
        "import json, sys, time, numpy as np\n"
        "own = np.ones(300 * 2**20, dtype=np.uint8)\n"
        "time.sleep(0.3)\n"
        "del own\n"
        "total = int(np.load(sys.argv[1], mmap_mode='r').sum())\n"
        "time.sleep(0.3)\n"
        "print(json.dumps({'total': total}))\n"
    )
    bare = watch([sys.executable, "-c", "import numpy, time; time.sleep(0.3); print('{}')"])
    found = watch([sys.executable, "-c", script, str(file)])
    assert found["total"] == 100 * 2**20
    assert found["peak_anonymous_mb"] - bare["peak_anonymous_mb"] == pytest.approx(300, abs=20)
    assert found["peak_mapped_mb"] - bare["peak_mapped_mb"] > 90  # sum() drops none, the kernel might


def test_positions_are_those_of_the_widest_rows():
    lengths = np.array([4, 8, 16, 15], dtype=np.int32)
    recipe = data_recipe("none", 300, max_length=16, batch_size=2)
    assert epoch_size(recipe, lengths) == (4, 2 * 16 + 2 * 8)  # 16 and 15, then 8 and 4
    recipe.data.packing = True
    assert epoch_size(recipe, lengths) == (3, 2 * 16 + 12)  # 16 | 15 | 8 and 4, in batches of two rows and of one


def test_a_corpus_is_a_document_a_line(tmp_path):
    write_corpus(tmp_path / "corpus.txt", documents=50, words=12)
    lines = (tmp_path / "corpus.txt").read_text().splitlines()
    assert len(set(lines)) == 50
    assert all(7 <= len(line.split()) <= 19 for line in lines)
