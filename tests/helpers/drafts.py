"""Proposers that no user has: drafts at random, and drafts of what will be said."""

import torch

from tests.helpers.tiny_models import SIZES
from twinattn.engine import Draft, NGram


class Wild(NGram):
    """Drafts at random: trees of any shape, right now and then, as there are few tokens to choose from."""

    def propose(self, tokens, *, depth, nodes, branches=None):
        seed = torch.Generator().manual_seed(len(tokens) * 1000 + sum(tokens) % 997)
        count = int(torch.randint(1, 9, (), generator=seed))
        drafted, parents, depths = [], [-1], [0]
        for node in range(1, min(count, nodes) + 1):
            allowed = [k for k in range(node) if depths[k] < min(depth, self.max_drafts)]
            parent = allowed[int(torch.randint(len(allowed), (), generator=seed))]
            parents.append(node - 1 if branches == 1 else parent)
            depths.append(depths[parents[-1]] + 1)
            drafted.append(int(torch.randint(SIZES["vocab_size"], (), generator=seed)))
        if max(depths) > depth:
            return None
        return Draft(tuple(drafted), tuple(parents))


class Chains(Wild):
    """Drafts at random, of one branch."""

    def propose(self, tokens, *, depth, nodes, branches=None):
        return super().propose(tokens, depth=depth, nodes=nodes, branches=1)


class Oracle(NGram):
    """Drafts what will be said, behind wrong tokens that come first: so what is accepted has to move."""

    def propose(self, tokens, *, depth, nodes, branches=None):
        answer = next(answer for answer in self.answers if answer[: len(tokens)] == tokens)
        right = answer[len(tokens) :][: min(depth, nodes // self.max_branches)]
        drafted, parents, at = [], [-1], 0
        for token in right:
            wrong = [(token + 1) % SIZES["vocab_size"], (token + 2) % SIZES["vocab_size"]][: self.max_branches - 1]
            drafted += [*wrong, token]
            parents += [at] * (len(wrong) + 1)
            at = len(drafted)
        return Draft(tuple(drafted), tuple(parents))
