//! Building a graph, placing it in the arena, running it.
//!
//! A [`Graph`] keeps alive everything its nodes point to: its own headers, the stores and the
//! block it reads, and the arena its intermediate results live in.

use std::ffi::{CStr, CString};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::arena::{Arena, ArenaShared};
use super::backend::Backend;
use super::block::Block;
use super::status::GgmlError;
use super::store::{Context, Store, StoreId};
use super::sys;
use super::tensor::{Dims, TensorId, check_new};
use crate::gguf::DType;

static NEXT_GRAPH: AtomicU32 = AtomicU32::new(1);

/// Collects nodes; every constructor in `ops.rs` is a method of it.
pub struct GraphBuilder {
    id: u32,
    tensors: Vec<NonNull<sys::ggml_tensor>>,
    graph: NonNull<sys::ggml_cgraph>,
    limit: usize,
    n_created: usize,
    stores: Vec<Arc<Store>>,
    blocks: Vec<Block>,
    // Reads an outline: may be asked about, not placed.
    is_outline: bool,
    flags: NodeFlags,
    context: Context,
}

/// What patched backends may do with the nodes of a graph (`ggml-patches/files/g4-ext.h`).
/// Libraries without our patches ignore it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeFlags {
    /// `G4_NODE_FUSE`: chains of element-wise nodes as one kernel.
    pub fuse: bool,
    /// `G4_NODE_ATTENTION`: attention over the visible keys only.
    pub attention: bool,
    /// `G4_NODE_F32_SUMS`: the CPU's attention adds values up in F32, whatever their type.
    pub f32_sums: bool,
}

impl NodeFlags {
    fn bits(self) -> i32 {
        i32::from(self.fuse) << 16
            | i32::from(self.attention) << 17
            | i32::from(self.f32_sums) << 18
    }
}

impl std::fmt::Debug for GraphBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "GraphBuilder({} tensors of {})",
            self.n_created, self.limit
        )
    }
}

impl GraphBuilder {
    /// Starts a graph of at most `limit` tensors, all of whose nodes will carry `flags`.
    ///
    /// # Errors
    /// [`GgmlError::Alloc`] when the headers do not fit in memory.
    pub fn new(limit: usize, flags: NodeFlags) -> Result<Self, GgmlError> {
        let context = Context::new(limit, true)?;
        // SAFETY: the context was sized for a graph of `limit` nodes.
        let graph = unsafe { sys::ggml_new_graph_custom(context.as_ptr(), limit, false) };
        let graph = NonNull::new(graph).ok_or(GgmlError::NodeBudget { limit })?;
        Ok(Self {
            id: NEXT_GRAPH.fetch_add(1, Ordering::Relaxed),
            tensors: Vec::new(),
            graph,
            limit,
            n_created: 0,
            stores: Vec::new(),
            blocks: Vec::new(),
            is_outline: false,
            flags,
            context,
        })
    }

    pub(super) fn ctx(&self) -> *mut sys::ggml_context {
        self.context.as_ptr()
    }

    pub(super) fn pointer(&self, id: TensorId) -> Result<NonNull<sys::ggml_tensor>, GgmlError> {
        find(self.id, &self.tensors, id)
    }

    /// Makes room for `n` headers; ggml would end the process when its context is full.
    pub(super) fn room(&mut self, n: usize) -> Result<(), GgmlError> {
        self.n_created += n;
        if self.n_created > self.limit {
            return Err(GgmlError::NodeBudget { limit: self.limit });
        }
        Ok(())
    }

    pub(super) fn push(&mut self, ptr: *mut sys::ggml_tensor) -> Result<TensorId, GgmlError> {
        let ptr = NonNull::new(ptr).ok_or(GgmlError::NodeBudget { limit: self.limit })?;
        let index = u32::try_from(self.tensors.len()).unwrap_or(u32::MAX);
        self.tensors.push(ptr);
        Ok(TensorId {
            graph: self.id,
            index,
        })
    }

    /// Shape of a tensor.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph.
    pub fn dims(&self, id: TensorId) -> Result<Dims, GgmlError> {
        let tensor = self.pointer(id)?;
        // SAFETY: the header is alive while the builder is.
        let ne = unsafe { tensor.as_ref() }.ne;
        Ok(Dims::new(&ne.map(|n| usize::try_from(n).unwrap_or(0))))
    }

    /// Takes a stored tensor (weight, K/V) into the graph.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] when `id` is not of `store`.
    pub fn import(&mut self, store: &Arc<Store>, id: StoreId) -> Result<TensorId, GgmlError> {
        let ptr = store.pointer(id)?;
        self.is_outline |= !store.is_allocated();
        if !self.stores.iter().any(|s| Arc::ptr_eq(s, store)) {
            self.stores.push(Arc::clone(store));
        }
        self.push(ptr.as_ptr())
    }

    /// Declares an input at a fixed offset of the block (invariant I2).
    ///
    /// # Errors
    /// [`GgmlError::Range`] when it does not fit in the block.
    pub fn input(
        &mut self,
        block: &Block,
        offset: usize,
        dtype: DType,
        dims: Dims,
        name: &str,
    ) -> Result<TensorId, GgmlError> {
        check_new(dtype, &dims)?;
        self.room(1)?;
        let ne = dims.as_ne();
        // SAFETY: room was checked, the type is known, rows are whole blocks.
        let ptr = unsafe { sys::ggml_new_tensor(self.ctx(), dtype.id() as _, 4, ne.as_ptr()) };
        let id = self.push(ptr)?;
        // SAFETY: the header is alive.
        let bytes = unsafe { sys::ggml_nbytes(ptr) };
        super::store::range("input block", offset, bytes, block.bytes())?;
        match block.place(offset) {
            Some((buffer, address)) => {
                // SAFETY: the range lies inside the block; the tensor has no buffer yet.
                let status = unsafe { sys::ggml_backend_tensor_alloc(buffer, ptr, address) };
                super::status::check(status, "input placement")?;
            }
            None => self.is_outline = true,
        }
        // SAFETY: the header is alive.
        unsafe { sys::ggml_set_input(ptr) };
        self.blocks.push(block.clone());
        self.name(id, name)?;
        Ok(id)
    }

    /// Names a tensor.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph.
    pub fn name(&self, id: TensorId, name: &str) -> Result<TensorId, GgmlError> {
        let ptr = self.pointer(id)?;
        if let Ok(name) = CString::new(name) {
            // SAFETY: header alive, name NUL-terminated; ggml truncates it.
            unsafe { sys::ggml_set_name(ptr.as_ptr(), name.as_ptr()) };
        }
        Ok(id)
    }

    /// Appends the nodes that `id` needs, in order, up to and including it.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph.
    pub fn expand(&mut self, id: TensorId) -> Result<TensorId, GgmlError> {
        let ptr = self.pointer(id)?;
        // SAFETY: the graph has room for every tensor that `room` admitted.
        unsafe { sys::ggml_build_forward_expand(self.graph.as_ptr(), ptr.as_ptr()) };
        Ok(id)
    }

    /// Keeps the memory of `inputs` from being given to another tensor before `node` has run, by
    /// making them sources that its operation does not read. For chains that one kernel computes:
    /// it reads the inputs of the first node when it writes the last.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph; [`GgmlError::NodeBudget`] when
    /// the node has no free source left.
    pub fn keep_until(&mut self, node: TensorId, inputs: &[TensorId]) -> Result<(), GgmlError> {
        let node = self.pointer(node)?;
        for (i, input) in inputs.iter().enumerate() {
            let input = self.pointer(*input)?;
            // SAFETY: the header is alive and not yet in a graph; nothing else refers to it now.
            let sources = unsafe { &mut (*node.as_ptr()).src };
            // No operation has as many operands as ggml has places for them: fill from behind.
            let free = sources.len().checked_sub(1 + i);
            match free.and_then(|at| sources.get_mut(at)) {
                Some(place) if place.is_null() => *place = input.as_ptr(),
                _ => return Err(GgmlError::NodeBudget { limit: i }),
            }
        }
        Ok(())
    }

    /// Marks a tensor whose memory must survive until the graph has run, and expands it.
    ///
    /// # Errors
    /// [`GgmlError::ForeignTensor`] for a handle of another graph.
    pub fn output(&mut self, id: TensorId) -> Result<TensorId, GgmlError> {
        let ptr = self.pointer(id)?;
        // SAFETY: the header is alive.
        unsafe { sys::ggml_set_output(ptr.as_ptr()) };
        self.expand(id)
    }

    /// Asks about every node of the graph and returns how many there are.
    ///
    /// # Errors
    /// [`GgmlError::Unsupported`] with the first node that `supports` refuses; `device` is its
    /// name in that error.
    pub fn ask(
        &self,
        device: &str,
        supports: &dyn Fn(&Node<'_>) -> bool,
    ) -> Result<usize, GgmlError> {
        let nodes = nodes(self.graph);
        for &node in &nodes {
            // SAFETY: nodes of a graph under construction are live headers of the builder.
            let node = Node(unsafe { &*node });
            if !supports(&node) {
                let info = node.info();
                return Err(GgmlError::Unsupported {
                    device: device.to_owned(),
                    op: info.op,
                    node: info.name,
                    sources: info.sources.join(", "),
                    shapes: info.shapes,
                });
            }
        }
        Ok(nodes.len())
    }

    /// Asks the backend about every node, places all intermediate results in the arena and closes
    /// the graph.
    ///
    /// # Errors
    /// [`GgmlError::Unsupported`] when the backend refuses a node, [`GgmlError::Alloc`] when the
    /// arena cannot grow, [`GgmlError::Unallocated`] when the graph reads an outline.
    pub fn finish(self, arena: &mut Arena, backend: &Backend) -> Result<Graph, GgmlError> {
        if self.is_outline {
            return Err(GgmlError::Unallocated);
        }
        self.ask(&backend.device().name(), &|node| backend.supports(node))?;
        let generation = arena.place(self.graph)?;
        let flags = self.flags.bits();
        let mut graph = Graph {
            id: self.id,
            tensors: self.tensors,
            graph: self.graph,
            generation,
            arena: Arc::clone(&arena.shared),
            fingerprint: 0,
            _stores: self.stores,
            _blocks: self.blocks,
            _context: self.context,
        };
        for node in graph.nodes() {
            // SAFETY: nodes of a live graph are live headers, and nothing runs it yet.
            unsafe { &mut *node }.flags |= flags;
        }
        graph.fingerprint = graph.compute_fingerprint();
        Ok(graph)
    }
}

/// The tensor behind a handle of the graph `owner`.
fn find(
    owner: u32,
    tensors: &[NonNull<sys::ggml_tensor>],
    id: TensorId,
) -> Result<NonNull<sys::ggml_tensor>, GgmlError> {
    let tensor = tensors.get(id.index as usize).copied();
    tensor
        .filter(|_| id.graph == owner)
        .ok_or(GgmlError::ForeignTensor)
}

/// Nodes of a live graph, in execution order.
fn nodes(graph: NonNull<sys::ggml_cgraph>) -> Vec<*mut sys::ggml_tensor> {
    // SAFETY: the graph is alive.
    let n = unsafe { sys::ggml_graph_n_nodes(graph.as_ptr()) };
    (0..n)
        // SAFETY: the index is below the node count.
        .map(|i| unsafe { sys::ggml_graph_node(graph.as_ptr(), i) })
        .collect()
}

/// A built graph: fixed topology, fixed addresses, to be run many times.
pub struct Graph {
    id: u32,
    tensors: Vec<NonNull<sys::ggml_tensor>>,
    graph: NonNull<sys::ggml_cgraph>,
    generation: u64,
    fingerprint: u64,
    arena: Arc<ArenaShared>,
    _stores: Vec<Arc<Store>>,
    _blocks: Vec<Block>,
    // Last: the headers that everything above points into.
    _context: Context,
}

// SAFETY: headers and graph are plain memory owned by this value.
unsafe impl Send for Graph {}

impl std::fmt::Debug for Graph {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Graph({} nodes)", self.n_nodes())
    }
}

impl Graph {
    pub(super) fn pointer(&self, id: TensorId) -> Result<NonNull<sys::ggml_tensor>, GgmlError> {
        find(self.id, &self.tensors, id)
    }

    pub(super) fn nodes(&self) -> Vec<*mut sys::ggml_tensor> {
        nodes(self.graph)
    }

    /// Number of nodes.
    pub fn n_nodes(&self) -> usize {
        self.nodes().len()
    }

    /// Whether the arena has not moved since this graph was placed.
    pub fn is_current(&self) -> bool {
        self.generation == self.arena.generation()
    }

    /// Names and operations of all nodes, in execution order.
    pub fn describe(&self) -> Vec<NodeInfo> {
        self.nodes()
            .into_iter()
            // SAFETY: nodes of a live graph are live headers.
            .map(|node| node_info(unsafe { &*node }))
            .collect()
    }

    /// Hash of everything that ggml-cuda compares before it replays: per node operation, type,
    /// shape, strides, parameters, address, view offset and sources.
    pub fn compute_fingerprint(&self) -> u64 {
        let mut hash = Fnv::new();
        for node in self.nodes() {
            // SAFETY: nodes of a live graph are live headers.
            let t = unsafe { &*node };
            hash.add(u64::from(t.op));
            hash.add(u64::from(t.type_));
            t.ne.iter().for_each(|n| hash.add(n.unsigned_abs()));
            t.nb.iter().for_each(|n| hash.add(*n as u64));
            t.op_params
                .iter()
                .for_each(|p| hash.add(u64::from(p.unsigned_abs())));
            hash.add(t.data.addr() as u64);
            hash.add(t.view_offs as u64);
            for src in t.src {
                hash.add(src.addr() as u64);
                if !src.is_null() {
                    // SAFETY: sources of a live node are live headers.
                    hash.add(unsafe { &*src }.data.addr() as u64);
                }
            }
        }
        hash.0
    }

    /// Fails when anything a replay depends on has changed since the graph was built.
    ///
    /// # Errors
    /// [`GgmlError::FingerprintChanged`] naming the bucket.
    pub fn audit(&self, bucket: &str) -> Result<(), GgmlError> {
        let now = self.compute_fingerprint();
        if now == self.fingerprint {
            return Ok(());
        }
        Err(GgmlError::FingerprintChanged {
            bucket: bucket.to_owned(),
            built: self.fingerprint,
            now,
        })
    }

    /// Queues the graph on the backend.
    ///
    /// # Errors
    /// [`GgmlError::Compute`] when the arena has moved or the backend fails.
    ///
    /// # Aborts
    /// ggml ends the process when the device fails or a kernel launch runs out of memory.
    pub fn compute(&mut self, backend: &Backend) -> Result<(), GgmlError> {
        if !self.is_current() {
            return Err(GgmlError::Compute {
                status: -1,
                what: "a graph of an older arena",
            });
        }
        backend.compute_async(self.graph.as_ptr())
    }

    /// Fills the arena with one byte between runs (tests; no work may be in flight).
    pub fn poison_arena(&self, backend: &Backend, byte: u8) {
        backend.synchronize();
        for node in self.nodes().into_iter().rev() {
            // SAFETY: nodes of a live graph are live headers.
            let t = unsafe { &*node };
            if t.view_src.is_null() && !t.buffer.is_null() {
                // SAFETY: a node that is no view was placed by the arena, whose buffer is alive.
                unsafe { sys::ggml_backend_buffer_clear(t.buffer, byte) };
                return;
            }
        }
    }

    /// Changes one node's parameters, to show that [`Self::audit`] catches it.
    #[doc(hidden)]
    pub fn tamper_for_test(&mut self) {
        if let Some(node) = self.nodes().first() {
            // SAFETY: the header is alive and exclusively borrowed through `self`.
            unsafe { &mut **node }.op_params[15] ^= 1;
        }
    }

    pub(super) fn first_node(&self) -> *mut sys::ggml_tensor {
        self.nodes()
            .first()
            .copied()
            .unwrap_or(std::ptr::null_mut())
    }
}

/// A node that a device is asked about.
#[derive(Clone, Copy)]
pub struct Node<'a>(&'a sys::ggml_tensor);

impl Node<'_> {
    /// Its name, operation, shapes and operands.
    pub fn info(&self) -> NodeInfo {
        node_info(self.0)
    }

    pub(super) fn as_ptr(&self) -> *const sys::ggml_tensor {
        self.0
    }
}

impl std::fmt::Debug for Node<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.info().fmt(f)
    }
}

/// One node, for traces and errors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Node name.
    pub name: String,
    /// Operation name.
    pub op: String,
    /// Shape of the result.
    pub dims: Dims,
    /// Types and shapes of result and operands.
    pub shapes: String,
    /// Names of the operands.
    pub sources: Vec<String>,
}

pub(super) fn text(ptr: *const std::ffi::c_char) -> String {
    if ptr.is_null() {
        return String::new();
    }
    // SAFETY: ggml's static names and the header's name array are NUL-terminated.
    unsafe { CStr::from_ptr(ptr) }
        .to_string_lossy()
        .into_owned()
}

fn type_and_dims(t: &sys::ggml_tensor) -> String {
    // SAFETY: the type id comes from a tensor that ggml made.
    let name = text(unsafe { sys::ggml_type_name(t.type_) });
    format!("{name}{:?}", t.ne)
}

fn node_info(t: &sys::ggml_tensor) -> NodeInfo {
    // SAFETY: the header is alive; the result is a static string.
    let op = text(unsafe { sys::ggml_op_desc(t) });
    let mut shapes = type_and_dims(t);
    let mut sources = Vec::new();
    for src in t.src.into_iter().filter(|s| !s.is_null()) {
        // SAFETY: sources of a live node are live headers.
        let s = unsafe { &*src };
        shapes.push_str(" <- ");
        shapes.push_str(&type_and_dims(s));
        sources.push(text(s.name.as_ptr()));
    }
    let dims = Dims::new(&t.ne.map(|n| usize::try_from(n).unwrap_or(0)));
    NodeInfo {
        name: text(t.name.as_ptr()),
        op,
        dims,
        shapes,
        sources,
    }
}

/// FNV-1a over 64-bit words.
struct Fnv(u64);

impl Fnv {
    fn new() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, word: u64) {
        self.0 = (self.0 ^ word)
            .wrapping_mul(0x0000_0100_0000_01b3)
            .rotate_left(17);
    }
}
