# SPDX-License-Identifier: Apache-2.0
from vllm.utils.torch_utils import set_random_seed

__all__ = ["set_random_seed"]
