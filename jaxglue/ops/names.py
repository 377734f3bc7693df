"""Names of the values in a decoder layer that a checkpoint policy can keep, offload or recompute."""

LAYER_INPUT = "layer_input"
QUERY = "query"
KEY = "key"
VALUE = "value"
ATTENTION_OUT = "attention_out"
ATTENTION_LSE = "attention_lse"
ATTENTION_RESIDUAL = "attention_residual"
GATE = "gate"
UP = "up"
LORA_HIDDEN = "lora_hidden"
ROUTING = "routing"
EXPERT_GATE_UP = "expert_gate_up"

LAYER_VALUES = {
    LAYER_INPUT: "the residual stream that enters the layer [B, T, D]",
    QUERY: "the query projection, before its norm and rotation [B, T, N·H]",
    KEY: "the key projection, before its norm and rotation [B, T, K·H]",
    VALUE: "the value projection [B, T, K·H]",
    ATTENTION_OUT: "attention's output, before its projection [B, T, N·H]",
    ATTENTION_LSE: "attention's log-sum-exp, float32, as large as [B, N, T]; only fused backends have it",
    ATTENTION_RESIDUAL: "the residual stream between attention and feed-forward [B, T, D]",
    GATE: "the gate projection of the feed-forward, before its adapter where SwiGLU adds it [B, T, F]",
    UP: "the up projection of the feed-forward, likewise [B, T, F]",
    LORA_HIDDEN: "the adapters' inputs projected to their ranks, one for all adapters of an input [B, T, ΣR]",
    ROUTING: "the assignments of tokens to experts in the experts' order, int32 [B·T·X]",
    EXPERT_GATE_UP: "the gate and up projections of the experts, in the experts' order [B·T·X, 2F]",
}
"""Every name with what it is."""
