"""GLUE's TSV layouts: each task's columns and quirks, in files of our own, and the same rows as `datasets`."""

import datasets
import pytest

from training.glue import TASKS, load_glue
from training.tabular import DataError

PARSES = "sentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
MNLI_HEAD = f"index\tpromptID\tpairID\tgenre\t{PARSES}"
STS_HEAD = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2"
FILES = {
    "cola": {
        "train.tsv": "gj04\t1\t\tThe dog sleeps.\ngj04\t0\t*\tSleeps dog the.\n",
        "dev.tsv": 'gj04\t1\t\tA "quote opens and never closes.\n',
        "test.tsv": "index\tsentence\n0\tThe cat eats.\n1\tEats.\n",
    },
    "sst2": {
        "train.tsv": "sentence\tlabel\nhide new secretions \t0\na fine film \t1\n",
        "dev.tsv": "sentence\tlabel\nit 's good\t1\n",
        "test.tsv": "index\tsentence\n0\tuneasy mishmash\n",
    },
    "mrpc": {
        "train.tsv": "\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
        '1\t11\t12\tHe said "yes .\tYes , he said .\n0\t13\t14\t"Quoted" start\tOther\n',
        "dev.tsv": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t1\t2\tOne\tTwo\n",
        "test.tsv": "index\t#1 ID\t#2 ID\t#1 String\t#2 String\n0\t5\t6\tLeft\tRight\n",
    },
    "stsb": {
        "train.tsv": f"{STS_HEAD}\tscore\n0\tg\tf\t2012\t1\tn\tn\tA plane.\tAn air plane.\t5.000\n"
        "1\tg\tf\t2012\t4\tn\tn\tA man.\tA dog.\t0.250\n",
        "dev.tsv": f"{STS_HEAD}\tscore\n0\tg\tf\t2012\t1\tn\tn\tA hat.\tA cap.\t3.8\n",
        "test.tsv": f"{STS_HEAD}\n0\tg\tf\t2012\t1\tn\tn\tA girl.\tA boy.\n",
    },
    "qqp": {
        "train.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n"
        "1\t2\t3\tHow?\tHow so?\t1\n4\t5\t6\tcut short\n"
        "7\t8\t9\tWho?\tWhere?\t0\n",
        "dev.tsv": "id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate\n1\t2\t3\tWhat?\tWhy?\t0\n",
        "test.tsv": "id\tquestion1\tquestion2\n0\tIs it?\tIs it so?\n",
    },
    "mnli": {
        "train.tsv": f"{MNLI_HEAD}\tsentence1\tsentence2\tlabel1\tgold_label\n"
        "0\tp\tq\tfiction\t(a)\t(b)\t(c)\t(d)\tIt rains.\tIt is wet.\tentailment\tentailment\n"
        "1\tp\tq\tfiction\t(a)\t(b)\t(c)\t(d)\tIt rains.\tIt is dry.\tcontradiction\tcontradiction\n",
        "dev_matched.tsv": f"{MNLI_HEAD}\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
        "0\tp\tq\tfiction\t(a)\t(b)\t(c)\t(d)\tHe left.\tHe ran.\tentailment\tneutral\tneutral\n",
        "dev_mismatched.tsv": f"{MNLI_HEAD}\tsentence1\tsentence2\tlabel1\tlabel2\tgold_label\n"
        "0\tp\tq\tletters\t(a)\t(b)\t(c)\t(d)\tShe left.\tShe stayed.\tneutral\tneutral\tcontradiction\n",
        "test_matched.tsv": f"{MNLI_HEAD}\tsentence1\tsentence2\n0\tp\tq\tx\t(a)\t(b)\t(c)\t(d)\tUp.\tDown.\n",
    },
    "qnli": {
        "train.tsv": "index\tquestion\tsentence\tlabel\n0\tWhere is it?\tIt is here.\tentailment\n"
        "1\tWhen?\tNo.\tnot_entailment\n",
        "dev.tsv": "index\tquestion\tsentence\tlabel\n0\tWho?\tMary did.\tentailment\n",
        "test.tsv": "index\tquestion\tsentence\n0\tWhat?\tThat.\n",
    },
    "rte": {
        "train.tsv": "index\tsentence1\tsentence2\tlabel\n0\tA.\tB.\tnot_entailment\n1\tC.\tD.\tentailment\n",
        "dev.tsv": "index\tsentence1\tsentence2\tlabel\n0\tE.\tF.\tentailment\n",
        "test.tsv": "index\tsentence1\tsentence2\n0\tG.\tH.\n",
    },
}
# What the files above say, read by eye: first texts, second texts, class ids of train.
TRAIN = {
    "cola": (["The dog sleeps.", "Sleeps dog the."], None, [1, 0]),
    "sst2": (["hide new secretions ", "a fine film "], None, [0, 1]),
    "mrpc": (['He said "yes .', '"Quoted" start'], ["Yes , he said .", "Other"], [1, 0]),
    "stsb": (["A plane.", "A man."], ["An air plane.", "A dog."], [5.0, 0.25]),
    "qqp": (["How?", "Who?"], ["How so?", "Where?"], [1, 0]),
    "mnli": (["It rains.", "It rains."], ["It is wet.", "It is dry."], [0, 2]),
    "qnli": (["Where is it?", "When?"], ["It is here.", "No."], [0, 1]),
    "rte": (["A.", "C."], ["B.", "D."], [1, 0]),
}


@pytest.fixture
def glue_folder(tmp_path):
    for task, files in FILES.items():
        folder = tmp_path / TASKS[task].folder
        folder.mkdir()
        for name, text in files.items():
            (folder / name).write_text(text, "utf-8")
    return tmp_path


@pytest.mark.parametrize("task", FILES)
def test_tsv_layout(glue_folder, task):
    data = load_glue(task, glue_folder)
    train = data.splits["train"]
    assert (train.texts, train.pairs, train.labels) == TRAIN[task]
    assert data.splits["test"].labels is None
    assert len(data.splits["test"]) >= 1
    assert data.kind == ("regression" if task == "stsb" else "classification")
    own = load_glue(task, glue_folder / TASKS[task].folder)
    assert own.splits["train"].texts == train.texts


def test_mnli_has_matched_and_mismatched(glue_folder):
    splits = load_glue("mnli", glue_folder).splits
    assert splits["validation"].labels == [1]  # neutral, of gold_label and not of label1
    assert splits["validation_mismatched"].labels == [2]


def test_cola_test_header_is_no_example(glue_folder):
    assert load_glue("cola", glue_folder).splits["test"].texts == ["The cat eats.", "Eats."]


def test_qqp_names_the_rows_it_left_out(glue_folder):
    assert "1 rows cut short" in load_glue("qqp", glue_folder).notes[0]


@pytest.mark.parametrize("saved", [False, True])
def test_hub_form(tmp_path, saved):
    def rows(labels):
        return datasets.Dataset.from_dict(
            {"question": ["q"] * len(labels), "sentence": ["s"] * len(labels), "label": labels}
        )

    loaded = datasets.DatasetDict({"train": rows([0, 1]), "validation": rows([1]), "test": rows([-1, -1])})
    if saved:
        loaded.save_to_disk(tmp_path / "qnli")
    data = load_glue("qnli", tmp_path / "qnli" if saved else loaded)
    assert data.splits["train"].labels == [0, 1]
    assert data.splits["train"].pairs == ["s", "s"]
    assert data.splits["test"].labels is None
    assert data.label_names == ["entailment", "not_entailment"]


@pytest.mark.parametrize(
    ("task", "file", "text", "message"),
    [
        (
            "sst2",
            "train.tsv",
            "text\tlabel\na\t1\n",
            r"train\.tsv: no column 'sentence'; the columns are 'text', 'label'",
        ),
        (
            "sst2",
            "train.tsv",
            "sentence\tlabel\na\t1\nb\t2\n",
            r"train\.tsv, row 2, column 'label': label '2' is not in the list",
        ),
        ("sst2", "train.tsv", "sentence\tlabel\n", r"train\.tsv: the train split is empty"),
        ("sst2", "train.tsv", "sentence\tlabel\na\t1\nb\t1\n", r"train\.tsv: all 2 rows have the one label 'positive'"),
        (
            "rte",
            "dev.tsv",
            "index\tsentence1\tsentence2\tlabel\n0\tE.\n",
            r"dev\.tsv, row 1: 2 fields, but the columns are",
        ),
        (
            "stsb",
            "dev.tsv",
            f"{STS_HEAD}\tscore\n0\tg\tf\t1\t1\tn\tn\tA\tB\tx\n",
            r"dev\.tsv, row 1, column 'score': label 'x'",
        ),
    ],
)
def test_bad_files_are_one_line(glue_folder, task, file, text, message):
    (glue_folder / TASKS[task].folder / file).write_text(text, "utf-8")
    with pytest.raises(DataError, match=message) as error:
        load_glue(task, glue_folder)
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(glue_folder):
    (glue_folder / "RTE/dev.tsv").unlink()
    with pytest.raises(DataError, match=r"RTE/dev\.tsv: no such file"):
        load_glue("rte", glue_folder)
