"""A toy task for tests that train: milliseconds a step, and a reward that random answers earn at times."""

import pytest
import torch


class Sums:
    """Prompt: two digits below 4; the first token of a right answer is their sum modulo 4. 1 for a right answer,
    and a tenth for ending in time. Vocabulary: 0 … 6, and 7, the end."""

    vocab_size, end, max_new_tokens = 8, 7, 4

    def __len__(self):
        return 16

    def problem(self, index):
        return divmod(index, 4)

    def prompts(self, indices):
        indices = torch.as_tensor(indices)
        return torch.stack((indices // 4, indices % 4), dim=1)

    def rewards(self, indices, completions, mask):
        right = completions[:, 0] == self.prompts(indices).sum(1) % 4
        return right.float() + 0.1 * (mask & (completions == self.end)).any(1)


@pytest.fixture
def sums():
    return Sums()
