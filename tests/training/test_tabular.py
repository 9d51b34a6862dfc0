"""Tables and CoNLL columns: all formats give the same examples, every fault is one line with file, row and column."""

import json

import pandas
import pytest

from training.finetune_data import DataOptions, data_digest, load_task
from training.tabular import DataError, load_token_task

ROWS = [{"review": "warm, and\ngood", "other": "x", "stars": 1}, {"review": "naïve “cold”", "other": "y", "stars": 0}]


def write(path, rows):
    if path.suffix == ".csv":
        pandas.DataFrame(rows).to_csv(path, index=False)
    elif path.suffix == ".tsv":
        pandas.DataFrame(rows).to_csv(path, index=False, sep="\t")
    elif path.suffix == ".parquet":
        pandas.DataFrame(rows).to_parquet(path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows), "utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def options(train, validation, **changes):
    files = {"train": train, "validation": validation} | changes.pop("more", {})
    return DataOptions("text", files=files, **{"text": "review", "label": "stars"} | changes)


@pytest.mark.parametrize("ending", ["csv", "tsv", "json", "jsonl", "parquet"])
def test_every_format_reads_the_same(tmp_path, ending):
    path = write(tmp_path / f"rows.{ending}", ROWS)
    data = load_task(options(path, path, pair="other"))
    assert data.splits["train"].texts == [row["review"] for row in ROWS]
    assert data.splits["train"].pairs == ["x", "y"]
    assert data.splits["train"].labels == [1, 0]
    assert data.label_names == ["0", "1"]


def test_a_line_of_json_ends_at_a_line_feed_alone(tmp_path):
    rows = [{"review": "a\u2028b\u0085c", "stars": 1}, {"review": "d", "stars": 0}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\r\n".join(json.dumps(row, ensure_ascii=False) for row in rows), "utf-8", newline="")
    assert load_task(options(path, path)).splits["train"].texts == [row["review"] for row in rows]


def test_labels_may_be_given_in_order(tmp_path):
    path = write(tmp_path / "rows.csv", [{"review": "a", "stars": "ham"}, {"review": "b", "stars": "spam"}])
    assert load_task(options(path, path, labels=("spam", "ham"))).splits["train"].labels == [1, 0]


def test_numbers_sort_as_numbers(tmp_path):
    path = write(tmp_path / "rows.csv", [{"review": "a", "stars": n} for n in (10, 9, 2)])
    assert load_task(options(path, path)).label_names == ["2", "9", "10"]


def test_the_digest_sees_one_changed_label(tmp_path):
    first = write(tmp_path / "a.csv", ROWS)
    second = write(tmp_path / "b.csv", [ROWS[0] | {"stars": 0}, ROWS[1] | {"stars": 1}])
    assert data_digest(load_task(options(first, first))) == data_digest(load_task(options(first, first)))
    assert data_digest(load_task(options(first, first))) != data_digest(load_task(options(second, first)))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"text": "a", "stars": 1}], r"bad\.jsonl: no column 'review'; the columns are 'text', 'stars'"),
        ([{"review": "a"}], r"bad\.jsonl: no column 'stars'; the columns are 'review'"),
        (
            [{"review": "a", "stars": 1}, {"review": None, "stars": 0}],
            r"bad\.jsonl, row 2, column 'review': the text is None",
        ),
        ([{"review": "a", "stars": 1}, {"stars": 0}], r"bad\.jsonl, row 2, column 'review': the text is None"),
        ([{"review": " ", "stars": 1}], r"bad\.jsonl, row 1, column 'review': the text is empty"),
        (
            [{"review": "a", "stars": 1}, {"review": "b", "stars": 7}],
            r"bad\.jsonl, row 2, column 'stars': label 7 is not in",
        ),
        ([{"review": "a", "stars": None}], r"bad\.jsonl, row 1, column 'stars': label None is not in the list"),
        ([], r"bad\.jsonl: the file holds no rows"),
    ],
)
def test_bad_validation_rows(tmp_path, rows, message):
    good, bad = write(tmp_path / "good.jsonl", ROWS), write(tmp_path / "bad.jsonl", rows)
    with pytest.raises(DataError, match=message) as error:
        load_task(options(good, bad))
    assert "\n" not in str(error.value)


def test_an_empty_split_is_named(tmp_path):
    good = write(tmp_path / "good.csv", ROWS)
    (tmp_path / "bad.csv").write_text("review,other,stars\n")
    with pytest.raises(DataError, match=r"bad\.csv: the validation split is empty"):
        load_task(options(good, str(tmp_path / "bad.csv")))


def test_one_class_only(tmp_path):
    bad = write(tmp_path / "bad.csv", [ROWS[0], ROWS[0]])
    with pytest.raises(DataError, match=r"bad\.csv: all 2 rows have the one label '1'"):
        load_task(options(bad, bad))


def test_a_test_split_without_labels_is_kept_unlabelled(tmp_path):
    good = write(tmp_path / "good.csv", ROWS)
    bare = write(tmp_path / "bare.csv", [{"review": "who knows"}])
    data = load_task(options(good, good, more={"test": bare}))
    assert data.splits["test"].labels is None
    with pytest.raises(DataError, match=r"bare\.csv: no column 'stars'"):
        load_task(options(good, bare))


def test_regression_refuses_what_is_no_number(tmp_path):
    good = write(tmp_path / "good.csv", ROWS)
    bad = write(tmp_path / "bad.csv", [ROWS[0] | {"stars": "five"}])
    chosen = {"files": {"train": good, "validation": bad}, "text": "review", "label": "stars"}
    with pytest.raises(DataError, match=r"bad\.csv, row 1, column 'stars': 'five' is not a finite number"):
        load_task(DataOptions("regression", **chosen))


def test_too_many_fields_in_a_row(tmp_path):
    (tmp_path / "bad.csv").write_text("review,stars\na,1\nb,0,extra\n")
    with pytest.raises(DataError, match=r"bad\.csv, row 2: 3 fields, but the header names 2 columns"):
        load_task(options(str(tmp_path / "bad.csv"), str(tmp_path / "bad.csv")))


@pytest.mark.parametrize("text", ['a "b" c,1\n"d" e,0\n', 'a,1\n"never closed,0\n'])
def test_stray_quotes_are_refused_not_swallowed(tmp_path, text):
    (tmp_path / "bad.csv").write_text("review,stars\n" + text)
    with pytest.raises(DataError, match=r"bad\.csv, row 2: .*quotes doubled"):
        load_task(options(str(tmp_path / "bad.csv"), str(tmp_path / "bad.csv")))


def test_an_unknown_ending(tmp_path):
    (tmp_path / "rows.xml").write_text("<a/>")
    with pytest.raises(DataError, match=r"rows\.xml: cannot tell the format from the ending '\.xml'"):
        load_task(options(str(tmp_path / "rows.xml"), str(tmp_path / "rows.xml")))


# ---- CoNLL columns -------------------------------------------

CONLL = "-DOCSTART- -X- O\n\nJohn NNP B-PER\nlived VBD O\n\nin IN O\nParis NNP B-LOC\n"


def test_conll_columns(tmp_path):
    (tmp_path / "a.txt").write_text(CONLL)
    data = load_token_task("tokens", {"train": tmp_path / "a.txt", "validation": tmp_path / "a.txt"})
    assert data.splits["train"].words == [["John", "lived"], ["in", "Paris"]]
    assert data.label_names == ["B-LOC", "B-PER", "O"]
    assert data.splits["train"].labels == [[1, 2], [2, 0]]
    assert data.metrics[0] == "entity_f1"
    tags = load_token_task("tokens", {"train": tmp_path / "a.txt", "validation": tmp_path / "a.txt"}, tag_column=1)
    assert tags.label_names == ["IN", "NNP", "VBD"]
    assert tags.metrics == ("accuracy",)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("John B-PER\n\nlived\n", r"bad\.txt, row 3, columns 0 \(token\) and -1 \(tag\): only 1 fields in 'lived'"),
        ("a O\nb O\n\nc O\nd B-ORG\n", r"bad\.txt, row 5, column -1: tag 'B-ORG' is not in the list"),
        ("\n\n", r"bad\.txt: the validation split is empty"),
    ],
)
def test_bad_conll(tmp_path, text, message):
    (tmp_path / "good.txt").write_text("John B-PER\nlived O\n")
    (tmp_path / "bad.txt").write_text(text)
    with pytest.raises(DataError, match=message):
        load_token_task("tokens", {"train": tmp_path / "good.txt", "validation": tmp_path / "bad.txt"})


def test_one_tag_only(tmp_path):
    (tmp_path / "a.txt").write_text("a O\nb O\n")
    with pytest.raises(DataError, match=r"a\.txt: every token has the one tag 'O'"):
        load_token_task("tokens", {"train": tmp_path / "a.txt", "validation": tmp_path / "a.txt"})
