//! Inputs of a verify graph: which exist, where they lie in the I/O block, what fills each.
//!
//! All inputs are leafs at the graph's head, in memory outside the arena (invariant I2). The small
//! ones lie first and close together, so that one copy uploads them; masks come last and are
//! written by the device where it can.

use crate::Result;
use crate::ggml::{Block, Dims, GraphBuilder, TensorId};
use crate::gguf::DType;
use crate::graph::bucket::{BucketShape, Kind};
use crate::model::Config;

/// Alignment of an input in the block, in bytes. ggml-cuda aligns to 128.
const ALIGN: usize = 256;

/// What the inputs depend on besides the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputOptions {
    /// Rows of the ring of sliding-window layers.
    pub ring_rows: usize,
    /// Per-layer embeddings come from the host instead of being gathered on the device.
    pub host_ple: bool,
    /// Rows that nothing reads are not computed.
    pub skip_dead_rows: bool,
}

/// One input: where it lies and its shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Offset in the block, in bytes.
    pub offset: usize,
    /// Bytes.
    pub bytes: usize,
    dtype: DType,
    dims: Dims,
}

/// Masks of one set of query rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskSlots {
    /// F16 `[n_kv, n_rows]`.
    pub global: Option<Slot>,
    /// F16 `[ring_rows, n_rows]`.
    pub swa: Option<Slot>,
}

/// Positions, masks and host PLE rows of the wanted rows, when they run apart from the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OutSlots {
    /// I32 `[n_out]`: row of each wanted token in the chunk.
    pub ids: Slot,
    /// I32 `[n_out]`: its token.
    pub tokens: Slot,
    /// I32 `[n_out]`: its position.
    pub pos: Slot,
    /// F32 `[n_embd_per_layer * tail layers, n_out]` when the host gathers.
    pub ple: Option<Slot>,
    /// Masks of the wanted rows.
    pub masks: MaskSlots,
}

/// All inputs of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InputLayout {
    /// I32 `[n_tokens]`.
    pub tokens: Slot,
    /// I32 `[n_tokens]`.
    pub pos: Slot,
    /// I64 `[n_tokens]`: rows of the linear caches that K/V are written to.
    pub rows_global: Slot,
    /// I64 `[n_tokens]`: rows of the rings.
    pub rows_swa: Slot,
    /// F32 `[n_embd_per_layer * layers, n_tokens]` when the host gathers.
    pub ple: Option<Slot>,
    /// Wanted rows, for `Tail`.
    pub out: Option<OutSlots>,
    /// Masks of all rows.
    pub masks: MaskSlots,
    /// Bytes of everything before the masks: uploaded in one copy.
    pub small_bytes: usize,
    /// Bytes of everything.
    pub total_bytes: usize,
}

struct Cursor(usize);

impl Cursor {
    fn take(&mut self, dtype: DType, dims: Dims) -> Slot {
        let row = dtype
            .row_bytes(dims.ne(0) as u64)
            .and_then(|b| usize::try_from(b).ok());
        let bytes = row.unwrap_or(0) * (dims.n_elements() / dims.ne(0).max(1));
        let offset = self.0;
        self.0 = (offset + bytes).next_multiple_of(ALIGN);
        Slot {
            offset,
            bytes,
            dtype,
            dims,
        }
    }
}

/// Layers that all rows run in full: `0..n`; and whether rows are cut after them.
pub fn full_layers(config: &Config, kind: Kind, skip_dead_rows: bool) -> usize {
    if skip_dead_rows && kind != Kind::Full {
        config.last_kv_layer()
    } else {
        config.n_layer
    }
}

impl InputLayout {
    /// Lays out the inputs of a bucket.
    pub fn new(config: &Config, shape: BucketShape, options: InputOptions) -> Self {
        let n = shape.n_tokens;
        let n_full = full_layers(config, shape.kind, options.skip_dead_rows);
        let n_ple = config.n_embd_per_layer;
        let mut at = Cursor(0);
        let tokens = at.take(DType::I32, Dims::new(&[n]));
        let pos = at.take(DType::I32, Dims::new(&[n]));
        let rows_global = at.take(DType::I64, Dims::new(&[n]));
        let rows_swa = at.take(DType::I64, Dims::new(&[n]));
        let host_ple = |at: &mut Cursor, layers: usize, rows: usize| {
            (options.host_ple && n_ple * layers > 0)
                .then(|| at.take(DType::F32, Dims::new(&[n_ple * layers, rows])))
        };
        let ple = host_ple(&mut at, n_full, n);
        let out_small = match shape.kind {
            Kind::Tail { n_out } => {
                let ids = at.take(DType::I32, Dims::new(&[n_out]));
                let tokens = at.take(DType::I32, Dims::new(&[n_out]));
                let pos = at.take(DType::I32, Dims::new(&[n_out]));
                let ple = host_ple(&mut at, config.n_layer - n_full, n_out);
                Some((n_out, ids, tokens, pos, ple))
            }
            Kind::Body | Kind::Full => None,
        };
        // All so far goes up in one copy. Masks can be larger than all else together, and the device
        // fills them where it can.
        let small_bytes = at.0;
        let mut masks = |layers: std::ops::Range<usize>, rows: usize| {
            let of = |swa: bool| {
                config
                    .layers
                    .get(layers.clone())
                    .is_some_and(|l| l.iter().any(|l| l.is_swa == swa))
            };
            MaskSlots {
                global: of(false).then(|| at.take(DType::F16, Dims::new(&[shape.n_kv, rows]))),
                swa: of(true).then(|| at.take(DType::F16, Dims::new(&[options.ring_rows, rows]))),
            }
        };
        let all = masks(0..n_full, n);
        let out = out_small.map(|(n_out, ids, tokens, pos, ple)| OutSlots {
            ids,
            tokens,
            pos,
            ple,
            masks: masks(n_full..config.n_layer, n_out),
        });
        let total_bytes = at.0;
        Self {
            tokens,
            pos,
            rows_global,
            rows_swa,
            ple,
            out,
            masks: all,
            small_bytes,
            total_bytes,
        }
    }
}

/// Mask inputs in a graph.
#[derive(Clone, Copy, Debug)]
pub struct Masks {
    /// F16 `[n_kv, n_rows]`.
    pub global: Option<TensorId>,
    /// F16 `[ring_rows, n_rows]`.
    pub swa: Option<TensorId>,
}

/// Inputs of the wanted rows in a graph.
#[derive(Clone, Copy, Debug)]
pub struct OutInputs {
    /// I32 `[n_out]`.
    pub ids: TensorId,
    /// I32 `[n_out]`.
    pub tokens: TensorId,
    /// I32 `[n_out]`.
    pub pos: TensorId,
    /// F32 `[n_embd_per_layer * tail layers, n_out]`.
    pub ple: Option<TensorId>,
    /// Their masks.
    pub masks: Masks,
}

/// All inputs in a graph.
#[derive(Clone, Copy, Debug)]
pub struct Inputs {
    /// I32 `[n_tokens]`.
    pub tokens: TensorId,
    /// I32 `[n_tokens]`.
    pub pos: TensorId,
    /// I64 `[n_tokens]`.
    pub rows_global: TensorId,
    /// I64 `[n_tokens]`.
    pub rows_swa: TensorId,
    /// F32 `[n_embd_per_layer * layers, n_tokens]`.
    pub ple: Option<TensorId>,
    /// Masks of all rows.
    pub masks: Masks,
    /// The wanted rows.
    pub out: Option<OutInputs>,
}

impl Inputs {
    /// Declares all inputs of a layout at the head of a graph.
    ///
    /// # Errors
    /// The block is too small.
    pub fn declare(b: &mut GraphBuilder, block: &Block, layout: &InputLayout) -> Result<Self> {
        let mut input = |slot: Slot, name: &str| {
            Ok::<_, crate::Error>(b.input(block, slot.offset, slot.dtype, slot.dims, name)?)
        };
        let mut maybe = |slot: Option<Slot>, name: &str| -> Result<Option<TensorId>> {
            slot.map(|slot| input(slot, name)).transpose()
        };
        let ple = maybe(layout.ple, "g4_inp_ple")?;
        let masks = Masks {
            global: maybe(layout.masks.global, "g4_mask_global")?,
            swa: maybe(layout.masks.swa, "g4_mask_swa")?,
        };
        let out_ple = maybe(layout.out.and_then(|o| o.ple), "g4_out_ple")?;
        let out_masks = Masks {
            global: maybe(
                layout.out.and_then(|o| o.masks.global),
                "g4_out_mask_global",
            )?,
            swa: maybe(layout.out.and_then(|o| o.masks.swa), "g4_out_mask_swa")?,
        };
        let out = match layout.out {
            Some(slots) => Some(OutInputs {
                ids: input(slots.ids, "inp_out_ids")?,
                tokens: input(slots.tokens, "g4_out_tokens")?,
                pos: input(slots.pos, "g4_out_pos")?,
                ple: out_ple,
                masks: out_masks,
            }),
            None => None,
        };
        Ok(Self {
            tokens: input(layout.tokens, "inp_tokens")?,
            pos: input(layout.pos, "inp_pos")?,
            rows_global: input(layout.rows_global, "g4_rows_global")?,
            rows_swa: input(layout.rows_swa, "g4_rows_swa")?,
            ple,
            masks,
            out,
        })
    }
}
