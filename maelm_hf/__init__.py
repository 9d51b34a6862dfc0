# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""MAE-LM encoders for transformers, and probes for any encoder. Importing it registers the Auto classes."""

# isort: off
from ._torchvision import make_torchvision_importable

make_torchvision_importable()  # before transformers, which imports torchvision where it is installed
# isort: on

from transformers import (  # noqa: E402
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForMultipleChoice,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .configuration_maelm import MaeLmConfig  # noqa: E402
from .masking import DataCollatorForMaeLm  # noqa: E402
from .modeling_maelm import (  # noqa: E402
    MaeLmForMaskedLM,
    MaeLmForMultipleChoice,
    MaeLmForQuestionAnswering,
    MaeLmForSequenceClassification,
    MaeLmForTokenClassification,
    MaeLmModel,
)

__version__ = "0.1.0"

AutoConfig.register(MaeLmConfig.model_type, MaeLmConfig)
for auto_class, model_class in (
    (AutoModelForPreTraining, MaeLmForMaskedLM),
    (AutoModel, MaeLmModel),
    (AutoModelForMaskedLM, MaeLmForMaskedLM),
    (AutoModelForSequenceClassification, MaeLmForSequenceClassification),
    (AutoModelForTokenClassification, MaeLmForTokenClassification),
    (AutoModelForQuestionAnswering, MaeLmForQuestionAnswering),
    (AutoModelForMultipleChoice, MaeLmForMultipleChoice),
):
    auto_class.register(MaeLmConfig, model_class)
    # Saving then writes the two model files beside the weights, so that the folder loads without this package.
    model_class.register_for_auto_class(auto_class.__name__)
MaeLmConfig.register_for_auto_class()

__all__ = [
    "DataCollatorForMaeLm",
    "MaeLmConfig",
    "MaeLmForMaskedLM",
    "MaeLmForMultipleChoice",
    "MaeLmForQuestionAnswering",
    "MaeLmForSequenceClassification",
    "MaeLmForTokenClassification",
    "MaeLmModel",
]
