"""Which parameters of a model are matrices for Muon, and which stay with AdamW."""

from __future__ import annotations

from torch import nn

#: Modules whose weights are tables or scales, not maps between hidden spaces.
_TABLES = (nn.Embedding, nn.EmbeddingBag)
#: The last map to logits, by the name it has in the common code bases; at any depth …
_HEAD_NAMES = {"lm_head", "embed_out", "unembed", "unembedding", "logits", "classifier"}
#: … and names that mean the head only at the top of a model.
_TOP_HEAD_NAMES = {"head", "output", "score"}
#: Bare parameters that are tables, by a part of their name.
_TABLE_NAMES = {"wte", "wpe", "pos_embed", "pos_emb", "position_embeddings", "cls_token"}


def param_groups_for_muon(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Split a model's trainable parameters into (matrices, rest): two flat lists.

    ``matrices`` are the weights between hidden spaces: linear maps, attention projections, MoE
    experts and routers, convolutions. ``rest``, for AdamW: embeddings, the LM head (by name, by a
    weight tied to an embedding, or outside the numbered layers by an embedding's shape), norms, biases,
    scalars, and weights that are a single row or column, whose orthogonalisation is only a
    normalisation. Frozen parameters are in neither; a shared parameter appears once.

        matrices, rest = param_groups_for_muon(model)
        optimizers = [Muon(matrices, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]
    """
    tables = [module for module in model.modules() if isinstance(module, _TABLES)]
    table_ids = {id(parameter) for module in tables for parameter in module.parameters(recurse=False)}
    table_shapes = {tuple(module.weight.shape) for module in tables}
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    seen: set[int] = set()
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or not parameter.requires_grad:
                continue
            seen.add(id(parameter))
            is_matrix = (
                id(parameter) not in table_ids
                and not _is_norm(module)
                and not _is_head(path, module, table_shapes)
                and not name.endswith("bias")
                and not _names_a_table(f"{path}.{name}")
                and parameter.ndim >= 2
                and parameter.shape[0] > 1
                and parameter[0].numel() > 1
            )
            (matrices if is_matrix else rest).append(parameter)
    return matrices, rest


def _is_norm(module: nn.Module) -> bool:
    return "norm" in type(module).__name__.lower()


def _is_head(path: str, module: nn.Module, table_shapes: set[tuple[int, ...]]) -> bool:
    parts = path.split(".")
    if parts[-1] in _HEAD_NAMES or (len(parts) == 1 and parts[0] in _TOP_HEAD_NAMES):
        return True
    # A matrix inside a numbered layer may have an embedding's shape by chance: width 256 on bytes does.
    in_a_layer = any(part.isdigit() for part in parts)
    return isinstance(module, nn.Linear) and not in_a_layer and tuple(module.weight.shape) in table_shapes


def _names_a_table(path: str) -> bool:
    return any(
        part in _TABLE_NAMES or part in ("embedding", "embeddings") for part in path.lower().split(".")
    )
