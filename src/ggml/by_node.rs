//! Running a graph node by node, to time each: for profiles without a GPU's own recorder.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use super::backend::Backend;
use super::graph::Graph;
use super::status::GgmlError;
use super::store::Context;
use super::sys;

impl Graph {
    /// Runs the graph one node at a time and waits for each; the time of each node.
    ///
    /// Results are those of [`Self::compute`] up to what fusing changes. The times hold what is
    /// paid once per run (starting threads, launching, waiting), so their sum is above the time of
    /// an ordinary run.
    ///
    /// # Errors
    /// As [`Self::compute`].
    ///
    /// # Aborts
    /// As [`Self::compute`].
    pub fn compute_by_node(&mut self, backend: &Backend) -> Result<Vec<Duration>, GgmlError> {
        if !self.is_current() {
            return Err(GgmlError::Compute {
                status: -1,
                what: "a graph of an older arena",
            });
        }
        let context = Context::new(8, true)?;
        // SAFETY: the context was sized for a graph of eight nodes.
        let single = unsafe { sys::ggml_new_graph_custom(context.as_ptr(), 8, false) };
        let single = NonNull::new(single).ok_or(GgmlError::NodeBudget { limit: 8 })?;
        let mut times = Vec::with_capacity(self.n_nodes());
        backend.synchronize();
        for node in self.nodes() {
            // SAFETY: the graph is alive and belongs to this function.
            unsafe { sys::ggml_graph_clear(single.as_ptr()) };
            // SAFETY: the graph has room for eight nodes and is empty; the node is alive.
            unsafe { sys::ggml_graph_add_node(single.as_ptr(), node) };
            let start = Instant::now();
            backend.compute_async(single.as_ptr())?;
            backend.synchronize();
            times.push(start.elapsed());
            if let Some(cuda) = backend.cuda() {
                cuda.release_node(backend, node);
            }
        }
        if let Some(cuda) = backend.cuda() {
            // The first node's record was the whole graph's.
            cuda.hold(backend, self)?;
        }
        Ok(times)
    }
}
