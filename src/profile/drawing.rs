//! A graph as a DOT drawing and as JSON.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::class::of_node;
use crate::ggml::{NodeFact, TensorFact};

/// A tensor in the JSON of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct TensorJson {
    /// Number, unique in the graph.
    pub id: usize,
    /// Number of the tensor whose memory it lies in.
    pub root: usize,
    /// Name.
    pub name: String,
    /// Element type.
    #[serde(rename = "type")]
    pub dtype: &'static str,
    /// Shape, fastest dimension first.
    pub shape: [usize; 4],
    /// Whether no node computes it.
    pub is_leaf: bool,
}

/// A node in the JSON of a graph.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NodeJson {
    /// Operation.
    pub op: String,
    /// Class of the work; null for views.
    pub class: Option<String>,
    /// Result.
    pub result: TensorJson,
    /// Numbers of the operands, in ggml's order.
    pub sources: Vec<usize>,
}

/// A graph as JSON.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct GraphJson {
    /// The bucket.
    pub bucket: String,
    /// Nodes in execution order.
    pub nodes: Vec<NodeJson>,
    /// Weights, caches and inputs.
    pub leafs: Vec<TensorJson>,
}

fn tensor(fact: &TensorFact) -> TensorJson {
    TensorJson {
        id: fact.id,
        root: fact.root,
        name: fact.name.clone(),
        dtype: fact.dtype.name(),
        shape: [0, 1, 2, 3].map(|i| fact.dims.ne(i)),
        is_leaf: fact.is_leaf,
    }
}

/// Weights, caches and inputs by number.
fn leafs(nodes: &[NodeFact]) -> BTreeMap<usize, &TensorFact> {
    let sources = nodes.iter().flat_map(|n| &n.sources);
    let leafs = sources.filter(|s| s.is_leaf);
    leafs.map(|s| (s.id, s)).collect()
}

/// A graph for other programs.
pub fn json(bucket: &str, nodes: &[NodeFact]) -> GraphJson {
    let node = |n: &NodeFact| NodeJson {
        op: n.op.clone(),
        class: of_node(n).map(|c| c.to_string()),
        result: tensor(&n.result),
        sources: n.sources.iter().map(|s| s.id).collect(),
    };
    GraphJson {
        bucket: bucket.to_owned(),
        nodes: nodes.iter().map(node).collect(),
        leafs: leafs(nodes).into_values().map(tensor).collect(),
    }
}

/// A graph for Graphviz.
pub fn dot(bucket: &str, nodes: &[NodeFact]) -> String {
    let mut text = String::new();
    // Writing to a String cannot fail.
    let _ = writeln!(text, "digraph {} {{", quoted(bucket));
    let _ = writeln!(text, "  node [shape=box, fontname=monospace];");
    for (id, leaf) in leafs(nodes) {
        let label = quoted(&label(leaf, "", 0));
        let _ = writeln!(text, "  t{id} [label={label}, style=dashed];");
    }
    for (i, node) in nodes.iter().enumerate() {
        let label = quoted(&label(&node.result, &node.op, i));
        let style = if node.is_view() { ", style=dotted" } else { "" };
        let _ = writeln!(text, "  t{} [label={label}{style}];", node.result.id);
        for source in &node.sources {
            let _ = writeln!(text, "  t{} -> t{};", source.id, node.result.id);
        }
    }
    text.push_str("}\n");
    text
}

fn label(t: &TensorFact, op: &str, i: usize) -> String {
    let head = if op.is_empty() {
        String::new()
    } else {
        format!("{i} {op}\n")
    };
    format!("{head}{}\n{} {}", t.name, t.dtype, t.dims)
}

fn quoted(text: &str) -> String {
    let text = text.replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.replace('\n', "\\n"))
}

#[cfg(test)]
mod tests {
    use super::super::testing::{leaf, node, tensor};
    use super::*;
    use crate::gguf::DType;

    fn nodes() -> Vec<NodeFact> {
        let w = leaf(0, "w \"1\"", DType::Q8_0, &[64, 8]);
        let x = leaf(1, "x", DType::F32, &[64, 2]);
        vec![node(
            "MUL_MAT",
            tensor(2, "y-0", DType::F32, &[8, 2]),
            vec![w, x],
        )]
    }

    #[test]
    fn dot_has_every_node_edge_and_quoted_name() {
        let text = dot("b", &nodes());

        assert!(text.starts_with("digraph \"b\" {\n"), "{text}");
        assert!(
            text.contains("t2 [label=\"0 MUL_MAT\\ny-0\\nf32 [8, 2, 1, 1]\"];"),
            "{text}"
        );
        assert!(
            text.contains("\"w \\\"1\\\"\\nq8_0 [64, 8, 1, 1]\", style=dashed"),
            "{text}"
        );
        assert!(
            text.contains("t0 -> t2;") && text.contains("t1 -> t2;"),
            "{text}"
        );
    }

    #[test]
    fn json_lists_operands_by_number_and_leafs_once() {
        let graph = json("b", &nodes());

        assert_eq!(graph.nodes[0].sources, [0, 1]);
        assert_eq!(graph.nodes[0].class.as_deref(), Some("weight_gemm"));
        let names: Vec<&str> = graph.leafs.iter().map(|l| l.name.as_str()).collect();
        assert_eq!(names, ["w \"1\"", "x"]);
    }
}
