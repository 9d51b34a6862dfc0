# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""PyPI's torchvision beside a CPU-only torch: `import torchvision` fails, and transformers with it."""

import importlib.util
import logging

import torch

logger = logging.getLogger(__name__)


def make_torchvision_importable() -> None:
    """Call it before the first import of timm or of a vision model.

    torchvision's compiled library is built for one torch build. Beside another (PyPI's torchvision and a CPU-only
    torch) it does not load, and `import torchvision` then stops at `operator torchvision::nms does not exist`,
    although nothing that classifies images ever calls that operator. Declaring the operators that the import names,
    without a body, is enough. Does nothing where torchvision is absent, or loads.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision

        return
    except RuntimeError as error:
        if "does not exist" not in str(error):
            raise
    for schema in (
        "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
        "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    ):
        torch.library.define(f"torchvision::{schema.partition('(')[0]}", schema[schema.index("(") :])
    import torchvision  # noqa: F401

    logger.info(
        "torchvision's compiled operators do not load beside torch %s: declared without a body", torch.__version__
    )
