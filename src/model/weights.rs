//! Weights in device memory: what is joined, in which type, and the upload.
//!
//! Joining replaces the originals, so no weight is held twice. Rows of quantised matrices are
//! independent, so a joined matrix is the files' rows one after another.

use std::ops::ControlFlow;
use std::sync::Arc;

use crate::Result;
use crate::ggml::{Backend, Dims, GraphBuilder, Store, TensorId, TensorSpec, to_bf16};
use crate::gguf::{DType, GgufFile, TensorEntry};
use crate::model::{Config, ConfigError, LayerConfig, names};

/// In which type the matrices are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WeightsMode {
    /// BF16 where the GPU multiplies it faster and it fits, else as in the file.
    #[default]
    Auto,
    /// As in the file.
    Native,
    /// BF16, dequantised at load.
    Bf16,
}

/// Index of a weight in its store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightId(usize);

/// An attention projection matrix: rows of Q, then of K, then of V (0 where absent).
#[derive(Clone, Copy, Debug)]
pub struct QkvMatrix {
    /// The matrix, `[n_embd, q + k + v]`.
    pub id: WeightId,
    /// Query rows.
    pub q: usize,
    /// Key rows.
    pub k: usize,
    /// Value rows.
    pub v: usize,
}

/// Gate and up projection, in one matrix or two.
#[derive(Clone, Copy, Debug)]
pub enum GateUp {
    /// `[n_embd, 2 n_ff]` (experts: `[n_embd, 2 n_ff_exp, n_expert]`), gate first.
    Joined(WeightId),
    /// Two matrices.
    Split {
        /// Gate.
        gate: WeightId,
        /// Up.
        up: WeightId,
    },
}

/// Weights of an expert layer's second branch.
#[derive(Clone, Debug)]
pub struct MoeWeights {
    /// Router, `[n_embd, n_expert]`.
    pub gate_inp: WeightId,
    /// Router input scale, `[n_embd]`.
    pub gate_inp_scale: WeightId,
    /// Norm before the experts, `[n_embd]`.
    pub pre_norm_2: WeightId,
    /// Norm after the dense branch, `[n_embd]`.
    pub post_norm_1: WeightId,
    /// Norm after the experts, `[n_embd]`.
    pub post_norm_2: WeightId,
    /// Experts' gate and up.
    pub gate_up: GateUp,
    /// Experts' down, `[n_ff_exp, n_embd, n_expert]`.
    pub down: WeightId,
    /// Scale of each expert's output, `[n_expert]`.
    pub down_scale: Option<WeightId>,
}

/// Per-layer-embedding weights of one layer.
#[derive(Clone, Copy, Debug)]
pub struct LayerPle {
    /// `[n_embd, n_embd_per_layer]`.
    pub inp_gate: WeightId,
    /// `[n_embd_per_layer, n_embd]`.
    pub proj: WeightId,
    /// `[n_embd]`.
    pub post_norm: WeightId,
}

/// Weights of one layer.
#[derive(Clone, Debug)]
pub struct LayerWeights {
    /// `[n_embd]`.
    pub attn_norm: WeightId,
    /// Q, K and V projections in as few matrices as the types allow.
    pub qkv: Vec<QkvMatrix>,
    /// `[n_embd_head]`.
    pub attn_q_norm: WeightId,
    /// `[n_embd_head]`, on layers that own K/V.
    pub attn_k_norm: Option<WeightId>,
    /// `[n_embd_head * n_head, n_embd]`.
    pub attn_output: WeightId,
    /// `[n_embd]`.
    pub post_attention_norm: WeightId,
    /// `[n_embd]`.
    pub ffn_norm: WeightId,
    /// Dense gate and up.
    pub gate_up: GateUp,
    /// `[n_ff, n_embd]`.
    pub ffn_down: WeightId,
    /// `[n_embd]`.
    pub post_ffw_norm: WeightId,
    /// `[1]`.
    pub out_scale: Option<WeightId>,
    /// Per-layer embedding block.
    pub ple: Option<LayerPle>,
    /// Expert branch.
    pub moe: Option<MoeWeights>,
}

/// Per-layer-embedding weights of the whole model.
///
/// The projection is split after the layers whose rows every chunk computes in full: rows for
/// layers `0..last_kv_layer` (`body`) and for the rest (`tail`).
#[derive(Clone, Copy, Debug)]
pub struct PleWeights {
    /// `[n_embd_per_layer * n_layer, n_vocab]`, in the file's type.
    pub token_embd: WeightId,
    /// `[n_embd, n_embd_per_layer * last_kv_layer]`; absent when that is 0 layers.
    pub body_proj: Option<WeightId>,
    /// `[n_embd, n_embd_per_layer * (n_layer - last_kv_layer)]`.
    pub tail_proj: WeightId,
    /// `[n_embd_per_layer]`.
    pub proj_norm: WeightId,
}

/// All weights of a model, resident.
#[derive(Debug)]
pub struct Weights {
    store: Arc<Store>,
    /// Whether matrices were converted to BF16.
    pub bf16: bool,
    /// `[n_embd, n_vocab]`, in the file's type.
    pub token_embd: WeightId,
    /// `[n_embd, n_vocab]`; the token embeddings when tied.
    pub output: WeightId,
    /// `[n_embd]`.
    pub output_norm: WeightId,
    /// `[n_embd_head / 2]` of the global layers.
    pub rope_freqs: Option<WeightId>,
    /// Per-layer embeddings.
    pub ple: Option<PleWeights>,
    /// One per layer.
    pub layers: Vec<LayerWeights>,
}

impl Weights {
    /// Takes a weight into a graph.
    ///
    /// # Errors
    /// A foreign handle.
    pub fn import(&self, b: &mut GraphBuilder, id: WeightId) -> Result<TensorId> {
        let id = self
            .store
            .id(id.0)
            .ok_or(crate::ggml::GgmlError::ForeignTensor)?;
        Ok(b.import(&self.store, id)?)
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        self.store.bytes()
    }
}

/// Rows of a file tensor that go into a resident one. Experts count as rows of one long matrix.
#[derive(Clone, Debug)]
struct Part {
    tensor: String,
    first_row: usize,
    n_rows: usize,
}

#[derive(Clone, Debug)]
struct Item {
    spec: TensorSpec,
    parts: Vec<Part>,
}

/// What will be resident, before anything is allocated: the plan and its size.
#[derive(Debug)]
pub struct WeightsPlan {
    items: Vec<Item>,
    weights: Skeleton,
    bf16: bool,
}

#[derive(Debug)]
struct Skeleton {
    token_embd: WeightId,
    output: WeightId,
    output_norm: WeightId,
    rope_freqs: Option<WeightId>,
    ple: Option<PleWeights>,
    layers: Vec<LayerWeights>,
}

struct Planner<'a> {
    file: &'a GgufFile,
    config: &'a Config,
    bf16: bool,
    items: Vec<Item>,
}

impl WeightsPlan {
    /// Decides what is joined and in which type; nothing is allocated.
    ///
    /// # Errors
    /// A tensor that the configuration needs is missing from the file.
    pub fn new(file: &GgufFile, config: &Config, bf16: bool) -> Result<Self> {
        let mut p = Planner {
            file,
            config,
            bf16,
            items: Vec::new(),
        };
        let token_embd = p.table(names::TOKEN_EMBD)?;
        let output = if config.tied_output {
            token_embd
        } else {
            p.table(names::OUTPUT)?
        };
        let output_norm = p.vector(names::OUTPUT_NORM)?;
        let has_global = config.layers.iter().any(|l| !l.is_swa);
        let rope_freqs = if has_global {
            Some(p.vector(names::ROPE_FREQS)?)
        } else {
            None
        };
        let ple = if config.n_embd_per_layer > 0 {
            Some(p.ple()?)
        } else {
            None
        };
        let layers = config
            .layers
            .iter()
            .map(|l| p.layer(l))
            .collect::<Result<Vec<_>>>()?;
        let weights = Skeleton {
            token_embd,
            output,
            output_norm,
            rope_freqs,
            ple,
            layers,
        };
        Ok(Self {
            items: p.items,
            weights,
            bf16,
        })
    }

    /// Bytes that will be resident.
    pub fn bytes(&self) -> u64 {
        let bytes = |item: &Item| {
            let dims = &item.spec.dims;
            let rows = (dims.n_elements() / dims.ne(0).max(1)) as u64;
            item.spec.dtype.row_bytes(dims.ne(0) as u64).unwrap_or(0) * rows
        };
        self.items.iter().map(bytes).sum()
    }

    /// Allocates and uploads everything, reporting bytes done and bytes in total.
    ///
    /// # Errors
    /// Out of memory, a type that cannot be converted, `progress` breaks.
    pub fn load(
        self,
        file: &GgufFile,
        backend: &Backend,
        n_threads: usize,
        progress: &mut dyn FnMut(u64, u64) -> ControlFlow<crate::Error>,
    ) -> Result<Weights> {
        let specs: Vec<TensorSpec> = self.items.iter().map(|i| i.spec.clone()).collect();
        let mut store = Store::allocate(backend, &specs, "weights", false, true)?;
        let (total, mut done) = (self.bytes(), 0);
        for (index, item) in self.items.iter().enumerate() {
            let id = store
                .id(index)
                .ok_or(crate::ggml::GgmlError::ForeignTensor)?;
            let mut bytes = Vec::new();
            for part in &item.parts {
                append(file, part, item.spec.dtype, n_threads, &mut bytes)?;
            }
            store.write(id, 0, &bytes)?;
            done += bytes.len() as u64;
            if let ControlFlow::Break(error) = progress(done, total) {
                return Err(error);
            }
        }
        let Skeleton {
            token_embd,
            output,
            output_norm,
            rope_freqs,
            ple,
            layers,
        } = self.weights;
        Ok(Weights {
            store: Arc::new(store),
            bf16: self.bf16,
            token_embd,
            output,
            output_norm,
            rope_freqs,
            ple,
            layers,
        })
    }
}

/// A tensor of a file that [`names::check`] has accepted.
///
/// # Errors
/// [`ConfigError::MissingTensor`] for a file that was not checked.
pub fn tensor<'a>(file: &'a GgufFile, name: &str) -> Result<&'a TensorEntry, ConfigError> {
    file.tensor(name).ok_or_else(|| missing(file, name))
}

fn missing(file: &GgufFile, name: &str) -> ConfigError {
    ConfigError::MissingTensor {
        path: file.paths().first().cloned().unwrap_or_default(),
        tensor: name.to_owned(),
        expected: Vec::new(),
    }
}

/// Appends rows of a file tensor, converted when the resident type differs.
fn append(
    file: &GgufFile,
    part: &Part,
    dtype: DType,
    n_threads: usize,
    out: &mut Vec<u8>,
) -> Result<()> {
    let entry = tensor(file, &part.tensor)?;
    let [ne0, ..] = entry.shape;
    let row = entry
        .dtype
        .row_bytes(ne0)
        .and_then(|b| usize::try_from(b).ok())
        .unwrap_or(0);
    let data = file.tensor_data(entry);
    let end = part
        .first_row
        .saturating_add(part.n_rows)
        .saturating_mul(row);
    let bytes = data
        .get(part.first_row * row..end)
        .ok_or_else(|| missing(file, &part.tensor))?;
    if entry.dtype == dtype {
        out.extend_from_slice(bytes);
    } else {
        let ne0 = usize::try_from(ne0).unwrap_or(0);
        out.extend_from_slice(&to_bf16(entry.dtype, bytes, ne0, n_threads)?);
    }
    Ok(())
}

impl Planner<'_> {
    fn entry(&self, name: &str) -> Result<(DType, Dims)> {
        let entry = tensor(self.file, name)?;
        let ne = entry.shape.map(|n| usize::try_from(n).unwrap_or(0));
        Ok((entry.dtype, Dims::new(&ne)))
    }

    /// The type a matrix is kept in. F32 stays: only an explicit choice may lose precision, and
    /// `bf16` on an F32 file is such a choice.
    fn resident(&self, dtype: DType) -> DType {
        if self.bf16 { DType::BF16 } else { dtype }
    }

    fn push(
        &mut self,
        name: &str,
        dtype: DType,
        dims: Dims,
        parts: Vec<Part>,
        only_mul_mat: bool,
    ) -> WeightId {
        let spec = TensorSpec {
            name: name.to_owned(),
            dtype,
            dims,
            only_mul_mat,
        };
        self.items.push(Item { spec, parts });
        WeightId(self.items.len() - 1)
    }

    fn whole(&self, name: &str) -> Result<Part> {
        let (_, dims) = self.entry(name)?;
        let n_rows = dims.n_elements() / dims.ne(0).max(1);
        Ok(Part {
            tensor: name.to_owned(),
            first_row: 0,
            n_rows,
        })
    }

    /// A tensor kept as it is: vectors, scales.
    fn vector(&mut self, name: &str) -> Result<WeightId> {
        let (dtype, dims) = self.entry(name)?;
        let part = self.whole(name)?;
        Ok(self.push(name, dtype, dims, vec![part], false))
    }

    /// A table whose rows are gathered: always in the file's type.
    fn table(&mut self, name: &str) -> Result<WeightId> {
        self.vector(name)
    }

    /// Rows `first..first + n` of a matrix.
    fn matrix_rows(&mut self, name: &str, first_row: usize, n_rows: usize) -> Result<WeightId> {
        let (dtype, dims) = self.entry(name)?;
        let part = Part {
            tensor: name.to_owned(),
            first_row,
            n_rows,
        };
        let dims = Dims::new(&[dims.ne(0), n_rows]);
        Ok(self.push(name, self.resident(dtype), dims, vec![part], true))
    }

    fn matrix(&mut self, name: &str) -> Result<WeightId> {
        let n_rows = self.entry(name)?.1.ne(1);
        self.matrix_rows(name, 0, n_rows)
    }

    /// Joins matrices of one resident type, gate before up, Q before K before V.
    fn join(&mut self, label: &str, parts: Vec<Part>) -> Result<Option<WeightId>> {
        let Some(first) = parts.first() else {
            return Ok(None);
        };
        let (dtype, dims) = self.entry(&first.tensor)?;
        let target = self.resident(dtype);
        for part in &parts {
            if self.resident(self.entry(&part.tensor)?.0) != target {
                return Ok(None);
            }
        }
        let dims = Dims::new(&[dims.ne(0), parts.iter().map(|p| p.n_rows).sum()]);
        Ok(Some(self.push(label, target, dims, parts, true)))
    }

    fn ple(&mut self) -> Result<PleWeights> {
        let config = self.config;
        let body_rows = config.n_embd_per_layer * config.last_kv_layer();
        let all_rows = config.n_embd_per_layer * config.n_layer;
        let name = names::PER_LAYER_MODEL_PROJ;
        let body_proj = if body_rows > 0 {
            Some(self.matrix_rows(name, 0, body_rows)?)
        } else {
            None
        };
        Ok(PleWeights {
            token_embd: self.table(names::PER_LAYER_TOKEN_EMBD)?,
            body_proj,
            tail_proj: self.matrix_rows(name, body_rows, all_rows - body_rows)?,
            proj_norm: self.vector(names::PER_LAYER_PROJ_NORM)?,
        })
    }

    /// Q, K, V as in the file: which tensor, which rows.
    fn qkv_parts(&self, l: &LayerConfig) -> [Option<Part>; 3] {
        let n_q = l.n_head * l.n_embd_head;
        let n_kv = l.n_head_kv * l.n_embd_head;
        let part = |tensor: String, first_row, n_rows| {
            Some(Part {
                tensor,
                first_row,
                n_rows,
            })
        };
        if l.qkv_fused_in_file {
            let name = names::attn_qkv(l.il);
            return [
                part(name.clone(), 0, n_q),
                if l.owns_kv {
                    part(name.clone(), n_q, n_kv)
                } else {
                    None
                },
                if l.owns_kv {
                    part(name, n_q + n_kv, n_kv)
                } else {
                    None
                },
            ];
        }
        let k = if l.owns_kv {
            part(names::attn_k(l.il), 0, n_kv)
        } else {
            None
        };
        let v = if l.owns_kv && !l.v_from_k {
            part(names::attn_v(l.il), 0, n_kv)
        } else {
            None
        };
        [part(names::attn_q(l.il), 0, n_q), k, v]
    }

    /// Joins Q, K and V. The last layer that owns K/V keeps Q apart: a chunk that is not the last
    /// needs its K and V rows only.
    fn qkv(&mut self, l: &LayerConfig) -> Result<Vec<QkvMatrix>> {
        let [q, k, v] = self.qkv_parts(l);
        let rows = |part: &Option<Part>| part.as_ref().map_or(0, |p| p.n_rows);
        let (n_q, n_k, n_v) = (rows(&q), rows(&k), rows(&v));
        let label = names::attn_qkv(l.il);
        let (q, k, v) = (Vec::from_iter(q), Vec::from_iter(k), Vec::from_iter(v));
        let kv = [k.clone(), v.clone()].concat();
        if l.il != self.config.last_kv_layer() {
            let all = [q.clone(), kv.clone()].concat();
            if let Some(id) = self.join(&label, all)? {
                return Ok(vec![QkvMatrix {
                    id,
                    q: n_q,
                    k: n_k,
                    v: n_v,
                }]);
            }
        }
        let mut matrices = Vec::new();
        if let Some(id) = self.join(&names::attn_q(l.il), q)? {
            matrices.push(QkvMatrix {
                id,
                q: n_q,
                k: 0,
                v: 0,
            });
        }
        if let Some(id) = self.join(&label, kv)? {
            matrices.push(QkvMatrix {
                id,
                q: 0,
                k: n_k,
                v: n_v,
            });
            return Ok(matrices);
        }
        if let Some(id) = self.join(&names::attn_k(l.il), k)? {
            matrices.push(QkvMatrix {
                id,
                q: 0,
                k: n_k,
                v: 0,
            });
        }
        if let Some(id) = self.join(&names::attn_v(l.il), v)? {
            matrices.push(QkvMatrix {
                id,
                q: 0,
                k: 0,
                v: n_v,
            });
        }
        Ok(matrices)
    }

    fn gate_up(&mut self, il: usize) -> Result<GateUp> {
        let (gate, up) = (names::ffn_gate(il), names::ffn_up(il));
        let parts = vec![self.whole(&gate)?, self.whole(&up)?];
        if let Some(id) = self.join("ffn_gate_up", parts)? {
            return Ok(GateUp::Joined(id));
        }
        Ok(GateUp::Split {
            gate: self.matrix(&gate)?,
            up: self.matrix(&up)?,
        })
    }

    /// Experts keep the file's type: resident BF16 would not fit for the published sizes, and
    /// ggml-cuda's BF16 expert product needs a host synchronisation per layer.
    fn moe(&mut self, l: &LayerConfig) -> Result<MoeWeights> {
        let il = l.il;
        let gate_up = if l.experts_fused_in_file {
            GateUp::Joined(self.vector(&names::ffn_gate_up_exps(il))?)
        } else {
            GateUp::Split {
                gate: self.vector(&names::ffn_gate_exps(il))?,
                up: self.vector(&names::ffn_up_exps(il))?,
            }
        };
        let down_scale = if l.has_expert_down_scale {
            Some(self.vector(&names::ffn_down_exps_scale(il))?)
        } else {
            None
        };
        Ok(MoeWeights {
            gate_inp: self.vector(&names::ffn_gate_inp(il))?,
            gate_inp_scale: self.vector(&names::ffn_gate_inp_scale(il))?,
            pre_norm_2: self.vector(&names::pre_ffw_norm_2(il))?,
            post_norm_1: self.vector(&names::post_ffw_norm_1(il))?,
            post_norm_2: self.vector(&names::post_ffw_norm_2(il))?,
            gate_up,
            down: self.vector(&names::ffn_down_exps(il))?,
            down_scale,
        })
    }

    fn layer(&mut self, l: &LayerConfig) -> Result<LayerWeights> {
        let il = l.il;
        let ple = if self.config.n_embd_per_layer > 0 {
            Some(LayerPle {
                inp_gate: self.matrix(&names::inp_gate(il))?,
                proj: self.matrix(&names::proj(il))?,
                post_norm: self.vector(&names::post_norm(il))?,
            })
        } else {
            None
        };
        Ok(LayerWeights {
            attn_norm: self.vector(&names::attn_norm(il))?,
            qkv: self.qkv(l)?,
            attn_q_norm: self.vector(&names::attn_q_norm(il))?,
            attn_k_norm: if l.owns_kv {
                Some(self.vector(&names::attn_k_norm(il))?)
            } else {
                None
            },
            attn_output: self.matrix(&names::attn_output(il))?,
            post_attention_norm: self.vector(&names::post_attention_norm(il))?,
            ffn_norm: self.vector(&names::ffn_norm(il))?,
            gate_up: self.gate_up(il)?,
            ffn_down: self.matrix(&names::ffn_down(il))?,
            post_ffw_norm: self.vector(&names::post_ffw_norm(il))?,
            out_scale: if l.has_out_scale {
                Some(self.vector(&names::layer_output_scale(il))?)
            } else {
                None
            },
            ple,
            moe: if l.is_moe { Some(self.moe(l)?) } else { None },
        })
    }
}
