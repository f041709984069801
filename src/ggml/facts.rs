//! What a built graph consists of: for profiles, drawings and audits. Reads headers, runs nothing.

use std::collections::HashMap;

use super::graph::{Graph, text};
use super::sys;
use super::tensor::Dims;
use crate::gguf::DType;

/// One tensor of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorFact {
    /// Number of the tensor, unique in its graph.
    pub id: usize,
    /// Number of the tensor whose memory it lies in: its own unless it is a view.
    pub root: usize,
    /// Name.
    pub name: String,
    /// Name of that tensor.
    pub root_name: String,
    /// Element type.
    pub dtype: DType,
    /// Shape.
    pub dims: Dims,
    /// Whether no node computes it: a weight, a cache, an input.
    pub is_leaf: bool,
}

impl TensorFact {
    /// Bytes of its elements, laid out densely.
    pub fn bytes(&self) -> u64 {
        let n_rows = self.dims.n_elements() / self.dims.ne(0).max(1);
        self.row_bytes().saturating_mul(n_rows as u64)
    }

    /// Bytes of one row.
    pub fn row_bytes(&self) -> u64 {
        self.dtype.row_bytes(self.dims.ne(0) as u64).unwrap_or(0)
    }
}

/// One node of a graph.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeFact {
    /// Operation, such as `MUL_MAT` or `GEGLU`.
    pub op: String,
    /// What it computes.
    pub result: TensorFact,
    /// What it reads, in ggml's order.
    pub sources: Vec<TensorFact>,
}

impl NodeFact {
    /// Whether it only describes memory and computes nothing.
    pub fn is_view(&self) -> bool {
        matches!(
            self.op.as_str(),
            "NONE" | "VIEW" | "RESHAPE" | "PERMUTE" | "TRANSPOSE"
        )
    }
}

/// Everything of a node that ggml-cuda compares before it replays.
#[derive(Clone, Debug, PartialEq, Eq)]
struct NodeProperties {
    name: String,
    /// Property and value, always in the same order.
    values: Vec<(&'static str, u64)>,
}

/// The properties of all nodes of a graph at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Properties(Vec<NodeProperties>);

/// The first difference between two moments.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Index of the node in execution order.
    pub index: usize,
    /// Its name now.
    pub node: String,
    /// What differs: `nodes`, `op`, `type`, `shape`, `stride`, `parameter`, `address`,
    /// `view offset`, `source` or `source address`.
    pub property: &'static str,
    /// Value before.
    pub before: u64,
    /// Value now.
    pub after: u64,
}

impl std::fmt::Display for Change {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "node {} ({}): {} was {:#x}, is {:#x}",
            self.index, self.node, self.property, self.before, self.after
        )
    }
}

impl Properties {
    /// Where `self` first differs from what it was `before`.
    pub fn first_change(&self, before: &Self) -> Option<Change> {
        for (index, (now, then)) in self.0.iter().zip(&before.0).enumerate() {
            let differs = now.values.iter().zip(&then.values).find(|(a, b)| a != b);
            if let Some((now_value, then_value)) = differs {
                return Some(Change {
                    index,
                    node: now.name.clone(),
                    property: now_value.0,
                    before: then_value.1,
                    after: now_value.1,
                });
            }
        }
        let (n_now, n_then) = (self.0.len(), before.0.len());
        (n_now != n_then).then(|| Change {
            index: n_now.min(n_then),
            node: String::new(),
            property: "nodes",
            before: n_then as u64,
            after: n_now as u64,
        })
    }
}

/// Numbers tensors in the order they are met.
#[derive(Default)]
struct Numbering(HashMap<usize, usize>);

impl Numbering {
    fn of(&mut self, ptr: *const sys::ggml_tensor) -> usize {
        let next = self.0.len();
        *self.0.entry(ptr.addr()).or_insert(next)
    }

    fn fact(&mut self, ptr: *const sys::ggml_tensor) -> TensorFact {
        // SAFETY: callers pass nodes of a live graph, or their sources: live headers.
        let t = unsafe { &*ptr };
        let root = if t.view_src.is_null() {
            ptr
        } else {
            t.view_src.cast_const()
        };
        // SAFETY: a view's source lives at least as long as the view (ggml.c: ggml_view_impl takes
        // the root, so one step is enough).
        let root_name = text(unsafe { &*root }.name.as_ptr());
        TensorFact {
            id: self.of(ptr),
            root: self.of(root),
            name: text(t.name.as_ptr()),
            root_name,
            dtype: DType::from_id(t.type_).unwrap_or(DType::F32),
            dims: Dims::new(&t.ne.map(|n| usize::try_from(n).unwrap_or(0))),
            is_leaf: t.op == sys::GGML_OP_NONE,
        }
    }
}

impl Graph {
    /// All nodes in execution order, with types and shapes.
    pub fn facts(&self) -> Vec<NodeFact> {
        let mut numbers = Numbering::default();
        let mut facts = Vec::new();
        for node in self.nodes() {
            // SAFETY: nodes of a live graph are live headers.
            let t = unsafe { &*node };
            // SAFETY: the header is alive; the result is a static string.
            let op = text(unsafe { sys::ggml_op_desc(node) });
            let sources = t.src.into_iter().filter(|s| !s.is_null());
            facts.push(NodeFact {
                op,
                sources: sources.map(|s| numbers.fact(s)).collect(),
                result: numbers.fact(node),
            });
        }
        facts
    }

    /// What a replay of this graph depends on, as it is now.
    pub fn properties(&self) -> Properties {
        let nodes = self.nodes().into_iter().map(|node| {
            // SAFETY: nodes of a live graph are live headers.
            let t = unsafe { &*node };
            NodeProperties {
                name: text(t.name.as_ptr()),
                values: values(t),
            }
        });
        Properties(nodes.collect())
    }
}

fn values(t: &sys::ggml_tensor) -> Vec<(&'static str, u64)> {
    let mut values = vec![("op", u64::from(t.op)), ("type", u64::from(t.type_))];
    values.extend(t.ne.iter().map(|n| ("shape", n.unsigned_abs())));
    values.extend(t.nb.iter().map(|n| ("stride", *n as u64)));
    let parameters = t.op_params.iter();
    values.extend(parameters.map(|p| ("parameter", u64::from(p.cast_unsigned()))));
    values.push(("address", t.data.addr() as u64));
    values.push(("view offset", t.view_offs as u64));
    for src in t.src {
        values.push(("source", src.addr() as u64));
        if !src.is_null() {
            // SAFETY: sources of a live node are live headers.
            let data = unsafe { &*src }.data;
            values.push(("source address", data.addr() as u64));
        }
    }
    values
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, shape: u64, address: u64) -> NodeProperties {
        NodeProperties {
            name: name.into(),
            values: vec![("shape", shape), ("address", address)],
        }
    }

    #[test]
    fn first_changed_node_and_property_are_named() {
        let before = Properties(vec![node("a", 1, 10), node("b", 2, 20)]);
        let now = Properties(vec![node("a", 1, 10), node("b", 2, 30)]);

        let change = now.first_change(&before).unwrap();

        assert_eq!(change.to_string(), "node 1 (b): address was 0x14, is 0x1e");
        assert_eq!(now.first_change(&now), None);
    }

    #[test]
    fn another_number_of_nodes_is_a_change() {
        let before = Properties(vec![node("a", 1, 10)]);
        let now = Properties(vec![node("a", 1, 10), node("b", 2, 20)]);

        assert_eq!(now.first_change(&before).unwrap().property, "nodes");
    }
}
