"""What is measured of a model's answers: solved problems, coverage, agreement, probabilities."""

from dslib.evaluation.answers import (
    answer_f1,
    boxed_answer,
    exact_match,
    normalize_answer,
    same_answer,
    tagged_answer,
    verify,
    word_set_f1,
)
from dslib.evaluation.coverage import (
    Cells,
    CoverageTable,
    SupportChange,
    best_of_n,
    consensus_at_k,
    coverage_table,
    majority_vote,
    sampling_efficiency_gap,
    support_change,
)
from dslib.evaluation.exact import (
    Distribution,
    answer_entropy,
    answer_kl,
    answer_logp,
    correct_probability,
    exact_pass_at_k,
    grouped_kl,
    guesser_rates,
    sequence_logp,
)
from dslib.evaluation.expressions import parse_number
from dslib.evaluation.passk import pass_at_k, pass_hat_k, plug_in_pass_at_k, rates_to_pass_at_k
from dslib.evaluation.perplexity import perplexity, response_perplexity
from dslib.evaluation.temperature import matched_temperature

__all__ = [
    "Cells",
    "CoverageTable",
    "Distribution",
    "SupportChange",
    "answer_entropy",
    "answer_f1",
    "answer_kl",
    "answer_logp",
    "best_of_n",
    "boxed_answer",
    "consensus_at_k",
    "correct_probability",
    "coverage_table",
    "exact_match",
    "exact_pass_at_k",
    "grouped_kl",
    "guesser_rates",
    "majority_vote",
    "matched_temperature",
    "normalize_answer",
    "parse_number",
    "pass_at_k",
    "pass_hat_k",
    "perplexity",
    "plug_in_pass_at_k",
    "rates_to_pass_at_k",
    "response_perplexity",
    "same_answer",
    "sampling_efficiency_gap",
    "sequence_logp",
    "support_change",
    "tagged_answer",
    "verify",
    "word_set_f1",
]
