"""Names of a decoder layer's values for checkpoint policies, which save, offload or recompute them."""

LAYER_INPUT = "layer_input"
QUERY = "query"
KEY = "key"
VALUE = "value"
ATTENTION_OUT = "attention_out"
ATTENTION_LSE = "attention_lse"
RECURRENT_OUT = "recurrent_out"
ATTENTION_BRANCH = "attention_branch"
ATTENTION_RESIDUAL = "attention_residual"
GATE = "gate"
UP = "up"
MLP_BRANCH = "mlp_branch"
DELTA_INPUT = "delta_input"
DELTA_GATES = "delta_gates"
OUTPUT_GATE = "output_gate"
LOW_RANK = "lora_hidden"
ROUTING = "routing"
EXPERT_GATE_UP = "expert_gate_up"
MERGED = "merged_weight"

LAYER_VALUES = {
    LAYER_INPUT: "the layer's input, the residual stream [B, T, D]",
    QUERY: "the query projection, before its norm and rotation [B, T, N·H], with gates twice as wide; in small layers"
    " keys and values beside it",
    KEY: "the key projection, before its norm and rotation [B, T, K·H]; in latent attention the latent vector of keys"
    " and values and the key that turns, before the vector's norm",
    VALUE: "the value projection [B, T, K·H]; in latent attention the projection of that vector to keys and values",
    ATTENTION_OUT: "attention's output, before its gate and its projection [B, T, N·H]; in linear attention the delta"
    " rule's [B, T, N·V], of short convolutions theirs [B, T, D]",
    RECURRENT_OUT: "Mamba-2's output beside attention's, before its gate and its projection [B, T, N·P]",
    ATTENTION_LSE: "attention's log-sum-exp, float32, of the size of [B, N, T]; only in fused backends",
    ATTENTION_BRANCH: "the projection of attention's output, where it has a norm before it is added [B, T, D]",
    ATTENTION_RESIDUAL: "the residual stream between attention and feed-forward [B, T, D]; in small layers"
    " its norm, too",
    GATE: "the gate projection of the feed-forward, without its adapter where SwiGLU adds it [B, T, F]; in small layers"
    " with it, and up's beside it",
    UP: "the up projection of the feed-forward, likewise [B, T, F]",
    MLP_BRANCH: "the feed-forward's output, where it has a norm before it is added [B, T, D]",
    DELTA_INPUT: "in linear attention, queries, keys and values before their convolution; of short convolutions, their"
    " input and gates; of Mamba-2, x, B and C",
    DELTA_GATES: "in linear attention, the inputs of β and of the decays, each [B, T, N]; of Mamba-2, of step sizes",
    OUTPUT_GATE: "in linear attention, the gate of its output [B, T, N·V]",
    LOW_RANK: "the adapters' inputs projected to their ranks, one for all adapters of an input [B, T, ΣR]",
    ROUTING: "the assignments of tokens to experts in the experts' order, int32 [B·T·X]",
    MERGED: "with --serve-as, the matrix of each linear layer with its adapter merged and rounded [out, in], whatever"
    " the tokens; kept only where it is named, or with none",
    EXPERT_GATE_UP: "the gate and up projections of the experts, in the experts' order [B·T·X, 2F]",
}
"""Description of every name."""
