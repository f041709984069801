//! Which layer each node of a graph belongs to, by the names of nodes and weights.

use crate::ggml::NodeFact;
use crate::model::{Config, names};

/// Where a node stands in the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// Token and per-layer embeddings.
    Embedding,
    /// A layer.
    Layer(usize),
    /// Output norm and logits.
    Head,
}

impl Place {
    /// Kind of layer, as tables name it: attention, and whether it owns K/V, has experts.
    pub fn kind(self, config: &Config) -> &'static str {
        let il = match self {
            Self::Embedding => return "embedding",
            Self::Head => return "head",
            Self::Layer(il) => il,
        };
        let Some(layer) = config.layers.get(il) else {
            return "unknown";
        };
        match (layer.is_swa, layer.owns_kv, layer.is_moe) {
            (true, true, false) => "sliding",
            (true, false, false) => "sliding_shared",
            (false, true, false) => "global",
            (false, false, false) => "global_shared",
            (true, true, true) => "sliding_moe",
            (true, false, true) => "sliding_shared_moe",
            (false, true, true) => "global_moe",
            (false, false, true) => "global_shared_moe",
        }
    }
}

/// What a node's own name or its weights say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mark {
    Layer(usize),
    Outside,
    Unknown,
}

/// How far behind an unnamed node its reader may stand to lend it a layer: a norm and its weight.
const NEAR: usize = 2;

/// The place of every node.
pub fn places(nodes: &[NodeFact]) -> Vec<Place> {
    let mut marks: Vec<Mark> = nodes.iter().map(mark).collect();
    for i in (0..nodes.len()).rev() {
        if marks.get(i) == Some(&Mark::Unknown)
            && let Some(found) = mark_of_near_reader(nodes, &marks, i)
            && let Some(slot) = marks.get_mut(i)
        {
            *slot = found;
        }
    }
    let last = marks.iter().rposition(|m| matches!(m, Mark::Layer(_)));
    let mut current = Place::Embedding;
    let mut places = Vec::with_capacity(nodes.len());
    for (i, mark) in marks.iter().enumerate() {
        current = match mark {
            Mark::Layer(il) => Place::Layer(*il),
            Mark::Unknown => current,
            Mark::Outside if last.is_some_and(|last| i > last) => Place::Head,
            Mark::Outside => Place::Embedding,
        };
        places.push(current);
    }
    places
}

fn mark_of_near_reader(nodes: &[NodeFact], marks: &[Mark], i: usize) -> Option<Mark> {
    let root = nodes.get(i)?.result.root;
    let near = nodes.iter().zip(marks).skip(i + 1).take(NEAR);
    near.filter(|(node, _)| node.sources.iter().any(|s| s.root == root))
        .map(|(_, mark)| *mark)
        .find(|mark| *mark != Mark::Unknown)
}

fn mark(node: &NodeFact) -> Mark {
    if let Some(il) = suffix(&node.result.name) {
        return Mark::Layer(il);
    }
    let weights = node.sources.iter().filter(|s| s.is_leaf);
    for weight in weights {
        if let Some(il) = names::layer_of(&weight.root_name) {
            return Mark::Layer(il);
        }
    }
    let name = &node.result.name;
    if name.is_empty() || name.starts_with("node_") || name.contains('(') {
        Mark::Unknown
    } else {
        Mark::Outside
    }
}

/// `3` of `Qcur_pos-3` and of `Qcur_pos-3 (permuted)`.
fn suffix(name: &str) -> Option<usize> {
    let name = name.split(" (").next().unwrap_or(name);
    name.rsplit_once('-')?.1.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::super::testing::{leaf, node, tensor};
    use super::*;
    use crate::gguf::DType;

    #[test]
    fn names_weights_and_near_readers_give_the_layer() {
        let t = |id, name: &str| tensor(id, name, DType::F32, &[4]);
        let weight = |id, name: &str| leaf(id, name, DType::F32, &[4]);
        let nodes = [
            node(
                "GET_ROWS",
                t(1, "inp_scaled"),
                vec![weight(0, "token_embd.weight")],
            ),
            // An unnamed norm, read by the named product behind it.
            node("RMS_NORM", t(2, "node_1"), vec![t(1, "inp_scaled")]),
            node("MUL", t(3, "attn_norm-0"), vec![t(2, "node_1")]),
            node(
                "MUL_MAT",
                t(4, "node_3"),
                vec![weight(9, "blk.0.attn_q.weight"), t(3, "")],
            ),
            node("GEGLU", t(5, "node_4"), vec![t(4, "node_3")]),
            node("ROPE", t(6, "Qcur_pos-1 (permuted)"), vec![t(8, "")]),
            node("MUL_MAT", t(7, "result_output"), vec![t(6, "")]),
        ];

        assert_eq!(
            places(&nodes),
            [
                Place::Embedding,
                Place::Layer(0),
                Place::Layer(0),
                Place::Layer(0),
                Place::Layer(0),
                Place::Layer(1),
                Place::Head
            ]
        );
    }
}
