//! Switches as asked for and as they take effect, and the named conditions of the fast path.

use serde::Serialize;

use super::super::bucket::BucketShape;
use super::super::budget::Resident;
use super::super::options::{Place, Readback};
use super::super::policy::{self, POOL_LIMIT};
use super::super::recordable;
use super::Request;
use crate::gguf::{DType, GgufFile};

/// From this many rows on, attention scans masks in tiles of [`TILE_ROWS`] rows.
const SCAN_ROWS: usize = 1024;
/// Query rows of an attention tile.
///
/// # Source
/// `docs/decisions/0003-cuda-graphs.md`, flash attention.
const TILE_ROWS: usize = 64;

/// One switch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Switch {
    /// Name, as in the options.
    pub name: &'static str,
    /// What was asked for.
    pub requested: &'static str,
    /// What takes effect; `none` where there is nothing to switch.
    pub active: &'static str,
    /// Why the two differ, or what follows; null when there is nothing to say.
    pub why: Option<String>,
}

/// One condition of the fast path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Condition {
    /// Its name.
    pub name: &'static str,
    /// Whether it holds.
    pub is_met: bool,
    /// What was found.
    pub found: String,
}

/// The conditions under which a prompt runs at full speed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FastPath {
    /// Whether all of them hold.
    pub is_met: bool,
    /// Names of those that do not.
    pub unmet: Vec<&'static str>,
    /// All of them.
    pub conditions: Vec<Condition>,
}

fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

fn place(place: Place) -> &'static str {
    match place {
        Place::Device => "device",
        Place::Host => "host",
    }
}

/// All switches.
pub(super) fn switches(request: Request<'_>) -> Vec<Switch> {
    let (config, device) = (request.config, request.device);
    let s = request.options.switches;
    let switch = |name, requested, active, why: Option<String>| Switch {
        name,
        requested,
        active,
        why,
    };
    let replay = (s.replay && !device.records_graphs)
        .then(|| "graphs are kept, but this backend records none".to_owned());
    let mask = if policy::host_masks(s.mask, device.has_mask_kernel) {
        Place::Host
    } else {
        Place::Device
    };
    let no_kernel = (mask != s.mask).then(|| "no device mask kernel on this backend".to_owned());
    let (ple, no_ple) = if config.n_embd_per_layer == 0 {
        let why = "the model has no per-layer embeddings".to_owned();
        ("none", Some(why))
    } else {
        (place(s.ple), None)
    };
    let readback = match s.readback {
        Readback::Pinned => "pinned",
        Readback::Pageable => "pageable",
    };
    let pinned_on_cpu = device.is_cpu && s.readback == Readback::Pinned;
    let no_pinned = pinned_on_cpu.then(|| "no pinned host memory on this backend".to_owned());
    let growth = (!s.pregrow).then(|| {
        "while caches grow, the old ones take memory beside the new ones: not counted".to_owned()
    });
    let has_library = device.compute_cap.is_some();
    let ours = |on: bool| {
        if has_library { on_off(on) } else { "none" }
    };
    let no_library =
        |on: bool| (on && !has_library).then(|| "no kernels of ours on this backend".to_owned());
    let dead = s.skip_dead_rows.then(|| {
        let last = config.last_kv_layer();
        format!("all rows run {last} of {} layers in full", config.n_layer)
    });
    vec![
        switch("replay", on_off(s.replay), on_off(s.replay), replay),
        switch("mask", place(s.mask), place(mask), no_kernel),
        switch("ple", place(s.ple), ple, no_ple),
        switch("pregrow", on_off(s.pregrow), on_off(s.pregrow), growth),
        switch(
            "readback",
            readback,
            if pinned_on_cpu { "pageable" } else { readback },
            no_pinned,
        ),
        switch(
            "skip_dead_rows",
            on_off(s.skip_dead_rows),
            on_off(s.skip_dead_rows),
            dead,
        ),
        switch("fuse", on_off(s.fuse), ours(s.fuse), no_library(s.fuse)),
        switch(
            "attention",
            on_off(s.attention),
            ours(s.attention),
            no_library(s.attention),
        ),
    ]
}

impl FastPath {
    pub(super) fn new(
        file: &GgufFile,
        request: Request<'_>,
        resident: Resident,
        shapes: &[BucketShape],
    ) -> Self {
        let mut conditions = device_conditions(request);
        conditions.extend(model_conditions(file, request, resident, shapes));
        let unmet: Vec<&'static str> = conditions
            .iter()
            .filter(|c| !c.is_met)
            .map(|c| c.name)
            .collect();
        Self {
            is_met: unmet.is_empty(),
            unmet,
            conditions,
        }
    }
}

fn condition(name: &'static str, is_met: bool, found: impl Into<String>) -> Condition {
    Condition {
        name,
        is_met,
        found: found.into(),
    }
}

/// What the device has, and what the switches leave on.
fn device_conditions(request: Request<'_>) -> Vec<Condition> {
    let (device, s) = (request.device, request.options.switches);
    let is_recorded = device.records_graphs && s.replay;
    let host_masks = policy::host_masks(s.mask, device.has_mask_kernel);
    let ple_on_device = s.ple == Place::Device || request.config.n_embd_per_layer == 0;
    let pinned = s.readback == Readback::Pinned && !device.is_cpu;
    let library = match device.compute_cap {
        Some(cap) => format!("compute capability {cap}"),
        None => "no functions of ours".to_owned(),
    };
    vec![
        condition("gpu", !device.is_cpu, device.name.clone()),
        condition("patched_backend", device.compute_cap.is_some(), library),
        condition(
            "graphs_recorded",
            is_recorded,
            format!(
                "recording {}, replay {}",
                on_off(device.records_graphs),
                on_off(s.replay)
            ),
        ),
        condition(
            "masks_on_device",
            !host_masks,
            if host_masks { "host" } else { "device" },
        ),
        condition(
            "per_layer_rows_on_device",
            ple_on_device,
            if ple_on_device { "device" } else { "host" },
        ),
        condition(
            "caches_grown_before_start",
            s.pregrow,
            format!("pregrow {}", on_off(s.pregrow)),
        ),
        condition(
            "pinned_readback",
            pinned,
            if pinned { "pinned" } else { "pageable" },
        ),
        condition(
            "dead_rows_skipped",
            s.skip_dead_rows,
            format!("skip_dead_rows {}", on_off(s.skip_dead_rows)),
        ),
        condition(
            "chains_fused",
            s.fuse && device.compute_cap.is_some(),
            format!("fuse {}", on_off(s.fuse)),
        ),
        condition(
            "hidden_keys_skipped",
            s.attention && device.compute_cap.is_some(),
            format!("attention {}", on_off(s.attention)),
        ),
    ]
}

/// What the model, its types and the buckets allow.
fn model_conditions(
    file: &GgufFile,
    request: Request<'_>,
    resident: Resident,
    shapes: &[BucketShape],
) -> Vec<Condition> {
    let kv_type = request.options.kv_type;
    let ragged = shapes
        .iter()
        .find(|s| s.n_tokens >= SCAN_ROWS && s.n_tokens % TILE_ROWS != 0);
    let weights = match resident {
        Resident::Native => "native",
        Resident::Bf16 => "bf16",
    };
    let unrecorded = unrecorded_experts(file, request, shapes);
    vec![
        condition("bf16_weights", resident == Resident::Bf16, weights),
        condition("f16_caches", kv_type == DType::F16, kv_type.name()),
        condition(
            "all_buckets_kept",
            shapes.len() <= POOL_LIMIT,
            format!("{} buckets, room for {POOL_LIMIT}", shapes.len()),
        ),
        condition(
            "whole_attention_tiles",
            ragged.is_none(),
            match ragged {
                Some(s) => format!("a bucket of {} tokens", s.n_tokens),
                None => format!("large buckets are multiples of {TILE_ROWS} tokens"),
            },
        ),
        condition(
            "recordable_experts",
            unrecorded.is_none(),
            unrecorded.unwrap_or_else(|| "products of experts are recorded".to_owned()),
        ),
    ]
}

/// The expert matrix whose product keeps some bucket from being recorded.
fn unrecorded_experts(
    file: &GgufFile,
    request: Request<'_>,
    shapes: &[BucketShape],
) -> Option<String> {
    let bound = recordable::bound(file, request.config)?;
    let n_tokens = shapes.iter().map(|s| s.n_tokens).max()?;
    (n_tokens > bound.n_tokens).then(|| {
        let (name, dtype) = (&bound.tensor, bound.dtype.name());
        format!(
            "{name} is {dtype}: recorded up to {} tokens, a bucket has {n_tokens}",
            bound.n_tokens
        )
    })
}
