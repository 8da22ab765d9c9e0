//! What lies where: layers on a GPU, as many as its memory holds, and the others on the host.

use ingle_cpu::planned_bytes;
use ingle_cuda::budget::{Fit, Needs, Room};
use ingle_engine::runner::{Plan, kv_bytes};
use ingle_graph::op::WeightUse;
use ingle_graph::split::Share;
use ingle_graph::{Activations, Error, Graph, Result};
use serde_json::{Value, json};

use crate::term::thousands;

/// Bytes of which a range of GPU memory that grows is a multiple, where no GPU is there to tell.
const GRANULARITY: usize = 2 << 20;

/// The host's number in placements: a GPU is 0.
pub const HOST: usize = 1;

/// The layers of a model on a GPU and on the host.
pub struct Layout {
    /// How many are where, and the GPU's bytes.
    pub fit: Fit,
    /// The GPU's memory; `None` where only a limit is known.
    room: Option<Room>,
    limit: Option<u64>,
    /// Bytes of weights, keys and values on the host.
    host: u64,
    /// Bytes of the keys and values alone.
    pub host_kv: u64,
}

impl Layout {
    /// On a GPU with this room, of which at most `limit` is used.
    ///
    /// # Errors
    /// A matrix that kernels cannot take; a rule of the language broken by a pass.
    pub fn new(plan: &Plan<'_>, room: Room, limit: Option<u64>) -> Result<Self> {
        Self::with(plan, Some(room), limit)
    }

    /// The same for any GPU with so much memory for a model.
    ///
    /// # Errors
    /// As [`Layout::new`].
    pub fn within(plan: &Plan<'_>, limit: u64) -> Result<Self> {
        Self::with(plan, None, Some(limit))
    }

    fn with(plan: &Plan<'_>, room: Option<Room>, limit: Option<u64>) -> Result<Self> {
        let Plan { graph, options, kv, buckets } = plan;
        let granularity = room.map_or(GRANULARITY, |room| room.granularity);
        let there = there(room, limit);
        let fit = Fit::new(graph, options, kv, buckets, granularity, there)?;
        let share = Share::of(graph, &fit.placement(), HOST).graph;
        let host_kv = kv_bytes(&share, options.kv, kv);
        let host = host_kv + weight_bytes(&share, options.activations);
        Ok(Self { fit, room, limit, host, host_kv })
    }

    /// Bytes for a model.
    fn there(&self) -> u64 {
        there(self.room, self.limit)
    }

    /// Refuses a GPU that has no room for the first layer.
    ///
    /// # Errors
    /// [`Error::Device`] with the numbers, and what to do.
    pub fn check(&self, device: &str) -> Result<()> {
        if self.fit.held > 0 {
            return Ok(());
        }
        let free = self.room.map(|Room { free, reserve, .. }| {
            format!("{free} are free, of which {reserve} are the driver's")
        });
        let limit = self.limit.map(|limit| format!("--gpu-memory allows {limit}"));
        let there: Vec<String> = free.into_iter().chain(limit).collect();
        Err(Error::Device {
            device: device.into(),
            what: format!(
                "the first of {} layers takes {}, but {} are there ({}): give a shorter context (-c), --kv q8_0, or \
                 --device cpu",
                self.fit.layers,
                self.fit.least,
                self.there(),
                there.join("; ")
            ),
        })
    }

    /// How many layers are where, and their bytes.
    pub fn line(&self) -> String {
        let Fit { layers, held, needs, most, .. } = self.fit;
        let [taken, there, all, host] = [needs.total(), self.there(), most.total(), self.host].map(thousands);
        let rest = match layers.checked_sub(held) {
            None => return format!("all {layers} layers are on the GPU ({taken} of {there} bytes)"),
            Some(0) => "the output is".into(),
            Some(1) => "the last and the output are".into(),
            Some(rest) => format!("the other {rest} and the output are"),
        };
        format!(
            "{held} of {layers} layers are on the GPU ({taken} of {there} bytes; all would take {all}), {rest} on the CPU \
             ({host} bytes); attention is f32x32 on both"
        )
    }

    /// What the GPU's bytes are taken for.
    pub fn parts(&self) -> [(&'static str, u64); 6] {
        let Needs { weights, kv, ropes, steps, scratch, rounding } = self.fit.needs;
        [
            ("weights", weights),
            ("keys and values", kv),
            ("rope tables", ropes),
            ("data of steps", steps),
            ("arena, scratch", scratch),
            ("rounding", rounding),
        ]
    }

    /// The same for scripts.
    pub fn json(&self) -> Value {
        let Fit { layers, held, needs, most, .. } = self.fit;
        json!({ "layers": layers, "gpu_layers": held.min(layers), "output_on_gpu": held > layers,
            "gpu_bytes": needs.total(), "gpu_limit_bytes": self.there(), "gpu_bytes_of_all": most.total(),
            "gpu_weights_bytes": needs.weights, "gpu_kv_bytes": needs.kv, "gpu_rope_bytes": needs.ropes,
            "gpu_step_bytes": needs.steps, "gpu_scratch_bytes": needs.scratch,
            "gpu_rounding_bytes": needs.rounding, "cpu_bytes": self.host })
    }
}

fn there(room: Option<Room>, limit: Option<u64>) -> u64 {
    match room {
        Some(room) => room.bytes(limit),
        None => limit.unwrap_or(0),
    }
}

/// Bytes of the host's weights, as they are packed or mapped.
fn weight_bytes(share: &Graph, activations: Activations) -> u64 {
    let weights = share.weights.iter().filter(|weight| weight.used != WeightUse::Rows);
    let bytes = weights.map(|weight| match planned_bytes(weight, activations) {
        0 => weight.bytes(),
        packed => packed,
    });
    bytes.sum::<usize>() as u64
}
