//! What is joined and in which type, decided before anything is allocated; then the upload.

use std::ops::ControlFlow;
use std::sync::Arc;

use super::{GateUp, LayerPle, LayerWeights, MoeWeights, PleWeights, QkvMatrix, WeightId, Weights};
use crate::Result;
use crate::ggml::{Backend, Dims, GgmlError, MappedRange, Store, TensorSpec, host_room, to_bf16};
use crate::gguf::{DType, GgufFile, TensorEntry};
use crate::model::{Config, ConfigError, LayerConfig, names};

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
        let rope_freqs = p.vector_if(has_global, names::ROPE_FREQS)?;
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
        let sources = self.items.iter().map(|item| {
            let rows = item.parts.iter().map(|part| rows(file, part));
            rows.collect::<Result<Vec<Rows>>>()
        });
        let sources = sources.collect::<Result<Vec<_>>>()?;
        let with_specs = || sources.iter().zip(&specs);
        let as_they_are = with_specs().map(|(rows, spec)| as_it_is(rows, spec.dtype).cloned());
        let as_they_are: Vec<Option<MappedRange>> = as_they_are.collect();
        let mut store = Store::place_weights(backend, &specs, &as_they_are)?;
        let (total, mut done) = (self.bytes(), 0);
        for (index, (rows, spec)) in with_specs().enumerate() {
            let id = store.id(index).ok_or(GgmlError::ForeignTensor)?;
            if !store.is_mapped(id) {
                match as_it_is(rows, spec.dtype) {
                    Some(bytes) => store.write(id, 0, bytes.as_bytes())?,
                    None => {
                        let n = store.tensor_bytes(id)?;
                        store.write(id, 0, &join(rows, spec.dtype, n, n_threads)?)?;
                    }
                }
                rows.iter().for_each(|rows| rows.bytes.release());
            } else if spec.name != names::PER_LAYER_TOKEN_EMBD {
                // Of that table prompts read few rows.
                rows.iter().for_each(|rows| rows.bytes.prefetch());
            }
            done += store.tensor_bytes(id)? as u64;
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

/// Rows of a file tensor, where they are mapped.
struct Rows {
    dtype: DType,
    /// Elements of a row.
    ne0: usize,
    bytes: MappedRange,
}

/// The rows of a part.
fn rows(file: &GgufFile, part: &Part) -> Result<Rows> {
    let entry = tensor(file, &part.tensor)?;
    let [ne0, ..] = entry.shape;
    let row = entry
        .dtype
        .row_bytes(ne0)
        .and_then(|b| usize::try_from(b).ok())
        .unwrap_or(0);
    let absent = || missing(file, &part.tensor);
    let mut bytes = file.tensor_range(entry).ok_or_else(absent)?;
    let (start, end) = (bytes.range.start, bytes.range.end);
    let at = |n_rows: usize| start.saturating_add(n_rows.saturating_mul(row));
    bytes.range = at(part.first_row)..at(part.first_row.saturating_add(part.n_rows));
    if bytes.range.end > end {
        return Err(absent().into());
    }
    Ok(Rows {
        dtype: entry.dtype,
        ne0: usize::try_from(ne0).unwrap_or(0),
        bytes,
    })
}

/// The bytes of a weight that lies in the file as it is wanted.
fn as_it_is(rows: &[Rows], dtype: DType) -> Option<&MappedRange> {
    match rows {
        [one] if one.dtype == dtype => Some(&one.bytes),
        _ => None,
    }
}

/// Rows one after another, `n` bytes, converted where the resident type differs.
fn join(rows: &[Rows], dtype: DType, n: usize, n_threads: usize) -> Result<Vec<u8>> {
    let mut out = host_room(n, "a weight that is joined or converted")?;
    for rows in rows {
        let bytes = rows.bytes.as_bytes();
        if rows.dtype == dtype {
            out.extend_from_slice(bytes);
        } else {
            out.extend_from_slice(&to_bf16(rows.dtype, bytes, rows.ne0, n_threads)?);
        }
    }
    Ok(out)
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

    /// A tensor kept as it is, where the model has it.
    fn vector_if(&mut self, is_there: bool, name: &str) -> Result<Option<WeightId>> {
        is_there.then(|| self.vector(name)).transpose()
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
        let part = |tensor: String, first_row, n_rows| Part {
            tensor,
            first_row,
            n_rows,
        };
        if l.qkv_fused_in_file {
            let name = names::attn_qkv(l.il);
            let kv = |first_row| l.owns_kv.then(|| part(name.clone(), first_row, n_kv));
            let q = part(name.clone(), 0, n_q);
            return [Some(q), kv(n_q), kv(n_q + n_kv)];
        }
        let q = part(names::attn_q(l.il), 0, n_q);
        let k = l.owns_kv.then(|| part(names::attn_k(l.il), 0, n_kv));
        let has_v = l.owns_kv && !l.v_from_k;
        let v = has_v.then(|| part(names::attn_v(l.il), 0, n_kv));
        [Some(q), k, v]
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
        let mut push = |id: Option<WeightId>, q, k, v| {
            matrices.extend(id.map(|id| QkvMatrix { id, q, k, v }));
            id.is_some()
        };
        push(self.join(&names::attn_q(l.il), q)?, n_q, 0, 0);
        if !push(self.join(&label, kv)?, 0, n_k, n_v) {
            push(self.join(&names::attn_k(l.il), k)?, 0, n_k, 0);
            push(self.join(&names::attn_v(l.il), v)?, 0, 0, n_v);
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
        let scale = names::ffn_down_exps_scale(il);
        let down_scale = self.vector_if(l.has_expert_down_scale, &scale)?;
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
            attn_k_norm: self.vector_if(l.owns_kv, &names::attn_k_norm(il))?,
            attn_output: self.matrix(&names::attn_output(il))?,
            post_attention_norm: self.vector(&names::post_attention_norm(il))?,
            ffn_norm: self.vector(&names::ffn_norm(il))?,
            gate_up: self.gate_up(il)?,
            ffn_down: self.matrix(&names::ffn_down(il))?,
            post_ffw_norm: self.vector(&names::post_ffw_norm(il))?,
            out_scale: self.vector_if(l.has_out_scale, &names::layer_output_scale(il))?,
            ple,
            moe: if l.is_moe { Some(self.moe(l)?) } else { None },
        })
    }
}
