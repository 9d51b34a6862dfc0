# Copyright 2026 The maelm_hf authors.
# SPDX-License-Identifier: Apache-2.0
"""From a checkpoint to the Hub and back."""

from .native import export_native
from .official import convert_official_state_dict
from .publish import publish, publish_steps
from .push import PublishError

__all__ = ["PublishError", "convert_official_state_dict", "export_native", "publish", "publish_steps"]
