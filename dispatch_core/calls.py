"""The facts of one attention call, validated and normalised once, before any rule sees them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dispatch_core.hardware import Device

HALF_TYPES = ("float16", "bfloat16")
FLOAT8 = "float8_e4m3fn"
ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, FLOAT8: 1}
BACKENDS = ("auto", "dense", "varlen", "sliding_window", "fp8")
ROPE_STYLES = ("half", "interleaved")


def _fail(fact: str, value: object, rule: str, remedy: str = "") -> None:
    raise ValueError(f"AttentionCall: {fact} is {value!r}; need {rule}.{' ' + remedy if remedy else ''}")


def _positive(fact: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        _fail(fact, value, "a positive int")


@dataclass(frozen=True)
class Window:
    """Keys visible beside a query's own position: `left` before it and `right` after it, ends inclusive; None is unbounded."""

    left: int | None = None
    right: int | None = None

    def __post_init__(self) -> None:
        for side in ("left", "right"):
            value = getattr(self, side)
            if value == -1:
                object.__setattr__(self, side, None)
            elif value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
                _fail(f"window.{side}", value, "an int of 0 or more, or None (or -1) for unbounded")


@dataclass(frozen=True)
class Paging:
    """Geometry of a paged cache: tokens per page, and entries per row of the page table."""

    page_size: int
    max_pages: int

    def __post_init__(self) -> None:
        _positive("paging.page_size", self.page_size)
        _positive("paging.max_pages", self.max_pages)

    @property
    def capacity(self) -> int:
        """Tokens one sequence can hold."""
        return self.page_size * self.max_pages


@dataclass(frozen=True)
class RopeFacts:
    """Rotary embedding of q and the new keys: leading dims rotated, positions allowed for, and pairing of dims."""

    rotary_dim: int
    max_position: int
    style: str = "half"

    def __post_init__(self) -> None:
        _positive("rope.max_position", self.max_position)
        if not isinstance(self.rotary_dim, int) or self.rotary_dim < 2 or self.rotary_dim % 2:
            _fail("rope.rotary_dim", self.rotary_dim, "a positive even int")
        if self.style not in ROPE_STYLES:
            _fail("rope.style", self.style, f"one of {', '.join(ROPE_STYLES)}")


@dataclass(frozen=True)
class AttentionCall:
    """What is known of a call when it is traced; hashable, and the only thing a rule may read.

    What was not asked for is None. Synonyms are one spelling: a window that hides nothing is None (and a demand for the
    sliding-window backend with one is "auto"), softcap 0 is None, a
    `head_dim_v`, `kv_dtype` or `out_dtype` equal to its default, and a scale equal to head_dim ** -0.5, are None.

    Attributes:
      device: the target.
      dtype: element type of q ("float16", "bfloat16", "float32", "float8_e4m3fn").
      batch, q_heads, kv_heads, head_dim: sizes; q_heads is a multiple of kv_heads.
      head_dim_v: head size of v and o; None: head_dim. Read it through `v_dim`.
      max_seqlen_q: static bound of the query lengths; exact when uniform. Query tokens per sequence in decode.
      max_seqlen_kv: static bound of the key lengths; exact when uniform. The capacity in decode.
      is_causal: key j is visible to query i iff j <= i + kv_len - q_len.
      scale: factor on q.k; None: head_dim ** -0.5. Read it through `softmax_scale`.
      softcap: c in c * tanh(s / c), or None.
      window: keys visible beside the query's own, or None.
      backend: which of the recorded request rules the caller demands ("auto": none).
      is_uniform: every sequence has exactly the maximal lengths.
      paging: geometry of a paged cache, or None.
      kv_dtype: element type of a cache that differs from dtype. Read it through `cache_dtype`.
      out_dtype: element type of o where it differs from dtype (FP8: from bfloat16). Read it through `o_dtype`.
      rope: rotary facts, or None.
      has_sinks: whether per-head sink logits join the softmax denominator.
      return_lse: whether the log-sum-exp is asked for.
    """

    device: Device
    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_seqlen_q: int
    max_seqlen_kv: int
    head_dim_v: int | None = None
    is_causal: bool = False
    scale: float | None = None
    softcap: float | None = None
    window: Window | None = None
    backend: str = "auto"
    is_uniform: bool = True
    paging: Paging | None = None
    kv_dtype: str | None = None
    out_dtype: str | None = None
    rope: RopeFacts | None = None
    has_sinks: bool = False
    return_lse: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.device, Device):
            _fail("device", self.device, "a Device", "Look one up with device_named(name).")
        for fact in ("batch", "q_heads", "kv_heads", "head_dim", "max_seqlen_q", "max_seqlen_kv"):
            _positive(fact, getattr(self, fact))
        if self.q_heads % self.kv_heads:
            _fail("q_heads", self.q_heads, f"a multiple of kv_heads, which is {self.kv_heads}")
        for fact in ("dtype", "kv_dtype", "out_dtype"):
            value = getattr(self, fact)
            if value not in ELEMENT_BYTES and not (value is None and fact != "dtype"):
                _fail(fact, value, f"one of {', '.join(ELEMENT_BYTES)}")
        if self.backend not in BACKENDS:
            _fail("backend", self.backend, f"one of {', '.join(BACKENDS)}")
        if self.head_dim_v is not None:
            _positive("head_dim_v", self.head_dim_v)
        if self.scale is not None and not math.isfinite(self.scale):
            _fail("scale", self.scale, "a finite number, or None for head_dim ** -0.5")
        if self.softcap is not None and not 0 <= self.softcap < math.inf:
            _fail("softcap", self.softcap, "a finite number of 0 or more (0 and None: no cap)")
        if self.rope is not None and self.rope.rotary_dim > self.head_dim:
            _fail("rope.rotary_dim", self.rope.rotary_dim, f"at most head_dim, which is {self.head_dim}")
        self._normalise()

    def _normalise(self) -> None:
        def is_default(fact: str, default: object) -> None:
            if getattr(self, fact) == default:
                object.__setattr__(self, fact, None)

        is_default("head_dim_v", self.head_dim)
        is_default("scale", self.head_dim**-0.5)
        is_default("softcap", 0)
        is_default("kv_dtype", self.dtype)
        is_default("out_dtype", "bfloat16" if self.is_fp8 else self.dtype)
        if self.window is not None:
            object.__setattr__(self, "window", self._visible_window(self.window))
            if self.window is None and self.backend == "sliding_window":
                object.__setattr__(self, "backend", "auto")

    def _visible_window(self, window: Window) -> Window | None:
        """The window with each bound that hides no key dropped; None when neither hides any.

        Query i of a request sits at key i + kv_len - q_len: at most kv_len - 1, so `left` hides nothing from
        max_seqlen_kv - 1 on, and at least kv_len - q_len, so `right` hides nothing from max_seqlen_q - 1 on, or at all
        under a causal mask.
        """
        left, right = window.left, window.right
        if left is not None and left >= self.max_seqlen_kv - 1:
            left = None
        if right is not None and (self.is_causal or right >= self.max_seqlen_q - 1):
            right = None
        return None if left is None and right is None else Window(left, right)

    @property
    def arch(self) -> int:
        """Compute capability of the target (90 for 9.0); 0 off CUDA."""
        return self.device.arch

    @property
    def is_fp8(self) -> bool:
        """Whether q, k and v are float8_e4m3fn."""
        return self.dtype == FLOAT8

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def v_dim(self) -> int:
        """Head size of v and o."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def softmax_scale(self) -> float:
        """The factor on q.k."""
        return self.head_dim**-0.5 if self.scale is None else self.scale

    @property
    def cache_dtype(self) -> str:
        """Element type of k and v."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def o_dtype(self) -> str:
        """Element type of o."""
        default = "bfloat16" if self.is_fp8 else self.dtype
        return default if self.out_dtype is None else self.out_dtype

    def __str__(self) -> str:
        stated = (f for f in fields(self) if f.name != "device" and getattr(self, f.name) not in (None, f.default))
        facts = [f"{f.name}={_text(getattr(self, f.name))}" for f in stated]
        return f"AttentionCall({', '.join([self.device.name, f'arch={self.arch}', *facts])})"


def _text(value: object) -> str:
    if isinstance(value, Window):
        return f"({value.left}, {value.right})"
    if isinstance(value, Paging):
        return f"{value.max_pages} pages of {value.page_size}"
    return str(value)
