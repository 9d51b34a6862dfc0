"""Masks: how many tokens, which ones, and what they depend on."""

import json
import math
import shutil
from collections import Counter

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch.utils.data import DataLoader
from toy_tokenizers import byte_level_tokenizer
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback, TrainingArguments

from maelm_hf import MaeLmConfig, MaeLmForMaskedLM
from maelm_hf.masking import DataCollatorForMaeLm, WordBoundaries, choose_hidden, uniform_numbers

TEXT = (
    "Representations of the masked tokens occupy dimensions that the real tokens cannot use (see Theorem 2.2), "
    "internationalisation notwithstanding. Hyperparameters: learning_rate=0.01, naïve façade. "
) * 4


def byte_pair_tokenizer() -> PreTrainedTokenizerFast:
    return byte_level_tokenizer([TEXT], 300)


def wordpiece_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    tokenizer.train_from_iterator([TEXT], trainers.WordPieceTrainer(vocab_size=120, special_tokens=specials))
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        cls_token="[CLS]",
        sep_token="[SEP]",
        pad_token="[PAD]",
        unk_token="[UNK]",
        mask_token="[MASK]",
    )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return byte_pair_tokenizer()


@pytest.fixture(scope="module")
def features(tokenizer) -> list[dict]:
    """Texts of 3 to 130 tokens, with their sample index."""
    ids = tokenizer(TEXT)["input_ids"][1:-1]
    lengths = [1, 2, 5, 6, 7, 13, 20, 33, 50, 64, 100, 128]
    return [
        {"input_ids": [0, *ids[:length], 2], "sample_index": 7 * number}
        for number, length in enumerate(lengths, start=3)
    ]


def hidden_sets(batch) -> list[list[int]]:
    return [row[row >= 0].tolist() for row in batch["hidden_index"]]


class TestCount:
    @pytest.mark.parametrize("ratio", [0.15, 0.4, 0.5])
    @pytest.mark.parametrize("length", [1, 3, 20, 200])
    def test_floor_of_ratio_times_n_plus_u(self, ratio, length):
        eligible = np.ones(length, dtype=bool)
        counts = [len(choose_hidden(eligible, ratio, seed=1, epoch=0, sample_index=index)) for index in range(4000)]
        low = math.floor(ratio * length)
        assert set(counts) <= {max(1, low), max(1, low + 1)}
        if low >= 1:  # below, the minimum of one hidden token raises the mean
            standard_error = 0.5 / math.sqrt(len(counts))
            assert abs(np.mean(counts) - ratio * length) < 5 * standard_error

    def test_every_position_is_equally_likely(self):
        eligible = np.ones(20, dtype=bool)
        times = np.zeros(20)
        draws = 6000
        for index in range(draws):
            times[choose_hidden(eligible, 0.25, seed=3, epoch=1, sample_index=index)] += 1
        expected = draws * 0.25
        chi_square = ((times - expected) ** 2 / (expected * 0.75)).sum() * 19 / 20
        assert chi_square < 43.8  # 99.9 % quantile of chi-square with 19 degrees of freedom

    def test_at_least_one_where_a_token_is_eligible(self):
        assert len(choose_hidden(np.array([False, True, False]), 1e-9, seed=0, epoch=0, sample_index=0)) == 1
        assert len(choose_hidden(np.zeros(3, dtype=bool), 0.5, seed=0, epoch=0, sample_index=0)) == 0

    def test_ratio_0_hides_nothing_and_1_everything_but_special_tokens(self, tokenizer, features):
        nothing = DataCollatorForMaeLm(tokenizer, 0.0)(features)
        assert (nothing["labels"] == -100).all()
        assert (nothing["hidden_index"] == -1).all()
        everything = DataCollatorForMaeLm(tokenizer, 1.0)(features)
        for feature, hidden in zip(features, hidden_sets(everything), strict=True):
            assert hidden == list(range(1, len(feature["input_ids"]) - 1))


class TestKey:
    def test_numbers_are_uniform_and_distinct_by_every_part_of_the_key(self):
        key = {"seed": 5, "epoch": 2, "sample_index": 9, "document": 0}
        reference = uniform_numbers(64, **key)
        assert ((reference >= 0) & (reference < 1)).all()
        assert np.array_equal(reference, uniform_numbers(64, **key))
        assert np.array_equal(reference[:10], uniform_numbers(10, **key))
        for name in key:
            assert not np.isin(uniform_numbers(64, **key | {name: 77}), reference).any()

    def test_a_mask_does_not_depend_on_batch_mates_or_order(self, tokenizer, features):
        collator = DataCollatorForMaeLm(tokenizer, seed=4)
        together = hidden_sets(collator(features))
        alone = [hidden_sets(collator([feature]))[0] for feature in features]
        backwards = hidden_sets(collator(features[::-1]))[::-1]
        assert together == alone == backwards

    @pytest.mark.parametrize("start_method", ["fork", "spawn"])
    def test_workers_change_nothing(self, tokenizer, features, start_method):
        def masks(workers):
            collator = DataCollatorForMaeLm(tokenizer, seed=4)
            loader = DataLoader(
                features,
                batch_size=5,
                collate_fn=collator,
                num_workers=workers,
                persistent_workers=workers > 0,
                multiprocessing_context=start_method if workers else None,
            )
            epochs = []
            for epoch in (0, 1):
                collator.set_epoch(epoch)
                epochs.append([hidden for batch in loader for hidden in hidden_sets(batch)])
            return epochs

        in_process, in_workers = masks(0), masks(2)
        assert in_process == in_workers
        assert in_process[0] != in_process[1]

    def test_epochs_differ(self, tokenizer, features):
        collator = DataCollatorForMaeLm(tokenizer)
        seen = []
        for epoch in range(3):
            collator.set_epoch(epoch)
            seen.append(str(hidden_sets(collator(features))))
        assert len(set(seen)) == 3
        collator.set_epoch(0)
        assert str(hidden_sets(collator(features))) == seen[0]
        # A feature's own epoch wins.
        assert str(hidden_sets(collator([feature | {"epoch": 2} for feature in features]))) == seen[2]

    def test_without_a_sample_index_the_text_is_the_key(self, tokenizer, features):
        collator = DataCollatorForMaeLm(tokenizer, seed=4)
        texts = [{"input_ids": feature["input_ids"]} for feature in features]
        as_tensors = [{"input_ids": torch.tensor(feature["input_ids"])} for feature in features]
        assert hidden_sets(collator(texts)) == hidden_sets(collator(as_tensors))
        assert hidden_sets(collator(texts)) != hidden_sets(DataCollatorForMaeLm(tokenizer, seed=5)(texts))


class TestBatch:
    def test_layout(self, tokenizer, features):
        batch = DataCollatorForMaeLm(tokenizer, pad_to_multiple_of=16)(features)
        assert all(tensor.dtype == torch.int64 for tensor in batch.values())
        assert batch["input_ids"].shape == (len(features), 144)
        assert batch["kept_index"].shape[1] % 8 == 0
        assert batch["hidden_index"].shape[1] % 4 == 0
        for row, feature in enumerate(features):
            original = torch.tensor(feature["input_ids"])
            length = len(original)
            input_ids, labels = batch["input_ids"][row], batch["labels"][row]
            hidden = input_ids == tokenizer.mask_token_id
            assert torch.equal(torch.where(hidden, labels, input_ids)[:length], original)
            assert ((labels != -100) == hidden).all()
            assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (144 - length)
            assert (input_ids[length:] == tokenizer.pad_token_id).all()
            kept_index, hidden_index = batch["kept_index"][row], batch["hidden_index"][row]
            assert hidden_index[hidden_index >= 0].tolist() == hidden.nonzero().flatten().tolist()
            assert kept_index[kept_index >= 0].tolist() == (~hidden[:length]).nonzero().flatten().tolist()
            # -1 only at the end
            assert (kept_index[(kept_index >= 0).sum() :] == -1).all()

    def test_special_tokens_only_when_asked(self, tokenizer, features):
        by_default = DataCollatorForMaeLm(tokenizer, 0.9)(features)
        assert not torch.isin(by_default["labels"], torch.tensor(tokenizer.all_special_ids)).any()
        asked = DataCollatorForMaeLm(tokenizer, 1.0, mask_special_tokens=True)(features)
        assert (asked["labels"] != -100).sum() == sum(len(feature["input_ids"]) for feature in features)
        marked = [
            feature | {"special_tokens_mask": [1, 1, *[0] * (len(feature["input_ids"]) - 2)]} for feature in features
        ]
        assert not (DataCollatorForMaeLm(tokenizer, 1.0)(marked)["labels"][:, 1] != -100).any()

    def test_padding_in_the_features_is_dropped(self, tokenizer, features):
        collator = DataCollatorForMaeLm(tokenizer)
        plain = collator(features)
        for side in ("left", "right"):
            tokenizer_inputs = [
                {
                    "input_ids": [1] * 9 + f["input_ids"] if side == "left" else f["input_ids"] + [1] * 9,
                    "attention_mask": [0] * 9 + [1] * len(f["input_ids"])
                    if side == "left"
                    else [1] * len(f["input_ids"]) + [0] * 9,
                    "sample_index": f["sample_index"],
                }
                for f in features
            ]
            padded = collator(tokenizer_inputs)
            assert all(torch.equal(plain[name], padded[name]) for name in plain)

    def test_stray_mask_ids_are_neutralised_and_counted(self, tokenizer):
        mask, unknown = tokenizer.mask_token_id, tokenizer.unk_token_id
        collator = DataCollatorForMaeLm(tokenizer, 0.5)
        batch = collator([{"input_ids": [0, 40, mask, 41, mask, 42, 2], "sample_index": 3}])
        assert collator.stray_mask_tokens == 2
        assert batch["input_ids"][0, [2, 4]].tolist() == [unknown, unknown]
        assert batch["labels"][0, [2, 4]].tolist() == [-100, -100]

    def test_stray_mask_ids_are_counted_in_workers(self, tokenizer):
        collator = DataCollatorForMaeLm(tokenizer, 0.5)
        rows = [{"input_ids": [0, 40, tokenizer.mask_token_id, 2], "sample_index": index} for index in range(10)]
        list(DataLoader(rows, batch_size=2, collate_fn=collator, num_workers=2))
        assert collator.stray_mask_tokens == 10

    def test_stray_mask_ids_are_refused_without_an_unknown_token(self):
        tokenizer = byte_pair_tokenizer()
        tokenizer.unk_token = None
        with pytest.raises(ValueError, match="holds the mask token"):
            DataCollatorForMaeLm(tokenizer)([{"input_ids": [0, 40, 4, 2]}])


class TestWholeWords:
    @pytest.mark.parametrize("make", [byte_pair_tokenizer, wordpiece_tokenizer])
    @pytest.mark.parametrize("with_word_ids", [True, False])
    def test_words_are_hidden_whole(self, make, with_word_ids):
        tokenizer = make()
        encoding = tokenizer(TEXT)
        # The reference: the tokenizer's own account of which word a token comes from.
        words = encoding.word_ids()
        feature = {"input_ids": encoding["input_ids"]} | ({"word_ids": words} if with_word_ids else {})
        collator = DataCollatorForMaeLm(tokenizer, 0.15, whole_word=True)
        pieces = 0
        for index in range(30):
            labels = collator([feature | {"sample_index": index}])["labels"][0]
            by_word: dict[int, set[bool]] = {}
            for word, label in zip(words, labels.tolist(), strict=True):
                if word is not None:
                    by_word.setdefault(word, set()).add(label != -100)
            letters = {word: states for word, states in by_word.items() if is_letters(tokenizer, encoding, word)}
            assert all(len(states) == 1 for states in letters.values())
            pieces += sum(1 for word, states in letters.items() if True in states and words.count(word) > 1)
            hidden, eligible = int((labels != -100).sum()), sum(word is not None for word in words)
            assert 0 < hidden <= math.floor(0.15 * eligible) + 1
        assert pieces > 10  # words of several tokens were hidden, so wholeness was tested

    def test_one_word_goes_even_if_it_is_longer_than_the_count(self):
        eligible = np.ones(6, dtype=bool)
        hidden = choose_hidden(eligible, 0.2, words=np.zeros(6, int), seed=0, epoch=0, sample_index=0)
        assert hidden.tolist() == list(range(6))

    def test_a_vocabulary_without_markers_is_refused(self):
        bare = Tokenizer(models.WordLevel({"<unk>": 0, "<pad>": 1, "<mask>": 2, "a": 3}, unk_token="<unk>"))
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=bare, unk_token="<unk>", pad_token="<pad>", mask_token="<mask>"
        )
        with pytest.raises(ValueError, match="word_ids"):
            WordBoundaries(tokenizer)


def is_letters(tokenizer, encoding, word) -> bool:
    """Whether a word is made of letters or digits: runs of punctuation may be split by the vocabulary's markers."""
    span = encoding.word_to_chars(word)
    return TEXT[span.start : span.end].strip().isalnum()


class TestPlainTrainer:
    """It drops columns that forward does not name, and tells a collator no epoch."""

    @pytest.mark.parametrize("workers", [0, 2])
    def test_masks_differ_by_epoch_and_resume_exactly(self, tokenizer, features, tmp_path, workers):
        rows = Dataset.from_list(features)
        seen: list[str] = []

        class Watching(MaeLmForMaskedLM):
            def forward(self, input_ids=None, kept_index=None, hidden_index=None, **inputs):
                seen.append(str([input_ids.tolist(), hidden_index.tolist()]))
                return super().forward(input_ids, kept_index=kept_index, hidden_index=hidden_index, **inputs)

        def train(resume: bool, stop_after: int | None = None) -> list[str]:
            seen.clear()
            torch.manual_seed(0)
            config = MaeLmConfig(
                vocab_size=len(tokenizer),
                hidden_size=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                intermediate_size=8,
                decoder_num_hidden_layers=1,
                mask_token_id=tokenizer.mask_token_id,
            )
            collator = DataCollatorForMaeLm(tokenizer, seed=1)
            arguments = TrainingArguments(
                output_dir=str(tmp_path / str(workers)),
                per_device_train_batch_size=4,
                num_train_epochs=3,
                save_steps=1,
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                dataloader_num_workers=workers,
                dataloader_persistent_workers=workers > 0,
                logging_strategy="no",
            )
            callbacks = [collator.epoch_callback()] + ([StopAfter(stop_after)] if stop_after else [])
            trainer = Trainer(Watching(config), arguments, collator, rows, callbacks=callbacks)
            trainer.train(resume_from_checkpoint=resume)
            return list(seen)

        whole = train(resume=False)
        assert len(whole) == 9
        assert len(set(whole)) == 9
        by_epoch = [Counter(row for batch in whole[at : at + 3] for row in hidden_by_text(batch)) for at in (0, 3, 6)]
        assert by_epoch[0] != by_epoch[1] != by_epoch[2] != by_epoch[0]
        for stop_after in (4, 6):  # in the middle of the second epoch, and at its end
            shutil.rmtree(tmp_path / str(workers))
            assert train(resume=False, stop_after=stop_after) == whole[:stop_after]
            assert train(resume=True) == whole[stop_after:]


class StopAfter(TrainerCallback):
    def __init__(self, step: int):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == self.step


def hidden_by_text(batch: str) -> list[str]:
    input_ids, hidden_index = json.loads(batch)
    return [f"{len(ids)}: {hidden}" for ids, hidden in zip(input_ids, hidden_index, strict=True)]


class TestPackedRows:
    def test_every_document_is_masked_by_itself(self, tokenizer, features):
        collator = DataCollatorForMaeLm(tokenizer)
        alone = hidden_sets(collator(features))
        lengths = [len(feature["input_ids"]) for feature in features]
        packed = collator(
            [
                {
                    "input_ids": [token for feature in features for token in feature["input_ids"]],
                    "document_ids": np.repeat(np.arange(len(features)), lengths),
                    "sample_index": [feature["sample_index"] for feature in features],
                }
            ]
        )
        starts = np.cumsum([0, *lengths[:-1]])
        assert hidden_sets(packed)[0] == [start + at for start, row in zip(starts, alone, strict=True) for at in row]
        assert packed["position_ids"][0].tolist() == [at for length in lengths for at in range(length)]

    def test_one_index_for_the_row_still_masks_every_document(self, tokenizer):
        collator = DataCollatorForMaeLm(tokenizer)
        rows = [{"input_ids": [40, 41, 42] * 20, "document_ids": [d for d in range(20) for _ in range(3)]}] * 2
        batch = collator([row | {"sample_index": index} for index, row in enumerate(rows)])
        assert ((batch["labels"].view(2, 20, 3) != -100).sum(-1) == 1).all()
        assert not torch.equal(batch["labels"][0], batch["labels"][1])


class TestArguments:
    @pytest.mark.parametrize("ratio", [-0.1, 1.5, float("nan")])
    def test_ratio_out_of_range(self, tokenizer, ratio):
        with pytest.raises(ValueError, match="mask_ratio"):
            DataCollatorForMaeLm(tokenizer, ratio)

    def test_negative_seed(self, tokenizer):
        with pytest.raises(ValueError, match="seed"):
            DataCollatorForMaeLm(tokenizer, seed=-1)

    @pytest.mark.parametrize("role", ["mask_token", "pad_token"])
    def test_missing_token(self, role):
        tokenizer = byte_pair_tokenizer()
        setattr(tokenizer, role, None)
        with pytest.raises(ValueError, match=f"{role}_id"):
            DataCollatorForMaeLm(tokenizer)

    def test_not_a_mapping(self, tokenizer):
        with pytest.raises(TypeError, match="input_ids"):
            DataCollatorForMaeLm(tokenizer)([[0, 40, 2]])
