//! A model on several devices: each holds what its layers need and runs its segments of every program, in turn.
//!
//! A segment becomes a program of its own ([`Part`]): what it reads of other segments comes with the step's inputs, and
//! what others read of it is one of its outputs. So a device sees whole programs of a smaller model and knows of no other
//! device; whatever it does with a program, such as capturing it, it does with each of its segments.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Arc;

use ingle_tensor::Checkpoint;

use crate::backend::{Backend, Inputs, KvPlan, PathCount, Prepared, Profile};
use crate::builder::Graph;
use crate::op::{Op, RopeId, WeightId};
use crate::options::{Placement, PlanOptions};
use crate::passes::place;
use crate::program::{Program, Segment, Slot};
use crate::{Error, Result};

/// Old numbers of what a device holds, in their order: its own number is the position.
#[derive(Clone, PartialEq, Debug)]
struct Numbers<T>(Vec<T>);

impl<T: Copy + Eq + Hash + Ord> Numbers<T> {
    fn of(used: impl Iterator<Item = T>) -> Self {
        let mut all: Vec<T> = used.collect();
        all.sort_unstable();
        all.dedup();
        Self(all)
    }

    fn position(&self, old: T) -> Option<usize> {
        self.0.binary_search(&old).ok()
    }
}

/// What one device of a placement holds.
#[derive(Clone, PartialEq, Debug)]
pub struct Share {
    /// Weights, rotary embeddings and attention layers of its nodes, numbered anew, and all groups of layers. It has no
    /// nodes: those are compiled with the whole graph.
    pub graph: Graph,
    weights: Numbers<WeightId>,
    ropes: Numbers<RopeId>,
    layers: Numbers<usize>,
}

/// The numbers an op refers to.
fn references(op: &mut Op) -> (Vec<&mut WeightId>, Option<&mut RopeId>, Option<&mut usize>) {
    match op {
        Op::Embed { table, .. } => (vec![table], None, None),
        Op::RmsNorm { weight, .. } => (vec![weight], None, None),
        Op::Linear { parts, .. } => {
            let of = parts.iter_mut().flat_map(|p| [Some(&mut p.weight), p.bias.as_mut()]);
            (of.flatten().collect(), None, None)
        }
        Op::Rope { rope, .. } => (Vec::new(), Some(rope), None),
        Op::KvStore { layer } => (Vec::new(), None, Some(layer)),
        Op::RopeStore { rope, layer, .. } => (Vec::new(), Some(rope), Some(layer)),
        Op::Attention { spec, .. } => (Vec::new(), None, Some(&mut spec.layer)),
        Op::Quantize { .. }
        | Op::Add
        | Op::Scale(_)
        | Op::Softcap(_)
        | Op::Peaks { .. }
        | Op::Sample { .. }
        | Op::Glu(_)
        | Op::TakeRows
        | Op::Copy { .. }
        | Op::Carried { .. } => (Vec::new(), None, None),
    }
}

impl Share {
    /// What `device` holds of `graph`.
    pub fn of(graph: &Graph, placement: &Placement, device: usize) -> Self {
        let mut placed = graph.clone();
        place::run(&mut placed, placement);
        let (mut weights, mut ropes, mut layers) = (Vec::new(), Vec::new(), Vec::new());
        for node in placed.nodes.iter_mut().filter(|node| node.device == device) {
            let (w, rope, layer) = references(&mut node.op);
            weights.extend(w.into_iter().map(|w| *w));
            ropes.extend(rope.map(|rope| *rope));
            layers.extend(layer.map(|layer| *layer));
        }
        let weights = Numbers::of(weights.into_iter());
        let (ropes, layers) = (Numbers::of(ropes.into_iter()), Numbers::of(layers.into_iter()));
        let own = Graph {
            weights: weights.0.iter().map(|&w| graph.weight(w).clone()).collect(),
            ropes: ropes.0.iter().map(|&RopeId(r)| graph.ropes[r as usize].clone()).collect(),
            kv: layers.0.iter().map(|&layer| graph.kv[layer]).collect(),
            kv_groups: graph.kv_groups.clone(),
            ..Graph::default()
        };
        Self { graph: own, weights, ropes, layers }
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.graph.weights.is_empty() && self.graph.kv.is_empty()
    }
}

/// A segment as a program of its own.
#[derive(Clone, PartialEq, Debug)]
pub struct Part {
    /// Its program, for the share of its device.
    pub program: Program,
    /// Outputs of the whole program that it wants, by [`Inputs::carried`].
    pub wants: Vec<usize>,
    /// Outputs of the whole program that it writes, by its own.
    pub writes: Vec<usize>,
}

impl Part {
    /// Segment `at` of `program`.
    ///
    /// # Errors
    /// A program that was not compiled from the graph of the share; one whose segments are not closed.
    pub fn of(program: &Program, at: usize, share: &Share) -> Result<Self> {
        let segment = &program.segments[at];
        let broken = |node: &str, what: String| Error::Verify { pass: "split", node: node.into(), what };
        let outputs = segment.steps.iter().flat_map(|step| &step.outputs);
        let mut writes: Vec<usize> = outputs
            .filter_map(|slot| match slot {
                Slot::Output { index, .. } => Some(*index),
                Slot::Arena { .. } => None,
            })
            .collect();
        writes.sort_unstable();
        let mut steps = segment.steps.clone();
        let mut wants = Vec::new();
        for step in &mut steps {
            let name = &step.name;
            if let Op::Copy { .. } = step.op {
                let [Slot::Output { index, .. }] = step.inputs[..] else {
                    return Err(broken(name, "copies a value that is no output".into()));
                };
                step.op = Op::Carried { index: wants.len() };
                step.inputs.clear();
                wants.push(index);
            }
            for slot in step.inputs.iter_mut().chain(&mut step.outputs) {
                if let Slot::Output { index, .. } = slot {
                    *index = writes
                        .binary_search(index)
                        .map_err(|_| broken(name, "reads an output of another segment".into()))?;
                }
            }
            let (weights, rope, layer) = references(&mut step.op);
            let foreign = || broken(name, format!("is not of the share of device {}", segment.device));
            for w in weights {
                *w = WeightId(share.weights.position(*w).ok_or_else(foreign)? as u32);
            }
            if let Some(rope) = rope {
                *rope = RopeId(share.ropes.position(*rope).ok_or_else(foreign)? as u32);
            }
            if let Some(layer) = layer {
                *layer = share.layers.position(*layer).ok_or_else(foreign)?;
            }
        }
        let program = Program {
            key: program.key.clone(),
            part: Some(at),
            segments: vec![Segment { device: 0, steps }],
            outputs: writes.iter().map(|&index| program.outputs[index].clone()).collect(),
            arena_bytes: vec![program.arena_bytes.get(segment.device).copied().unwrap_or(0)],
            weights: share.graph.weights.clone(),
            ropes: share.graph.ropes.clone(),
            kv: share.graph.kv.clone(),
            kv_groups: program.kv_groups.clone(),
        };
        Ok(Self { program, wants, writes })
    }
}

/// A part that is ready on its device.
struct Placed {
    device: usize,
    prepared: Prepared,
    wants: Vec<usize>,
}

/// A program, ready.
struct Ready {
    program: Arc<Program>,
    parts: Vec<Placed>,
    /// By output: its part, and its index there.
    owners: HashMap<usize, (usize, usize)>,
    ran: bool,
}

/// Several devices as one: device `i` of the placement is the `i`th.
pub struct Split {
    devices: Vec<Box<dyn Backend>>,
    shares: Vec<Share>,
    programs: Vec<Ready>,
    profiling: bool,
    profile: Option<Profile>,
}

impl Split {
    /// Devices with nothing loaded.
    pub fn new(devices: Vec<Box<dyn Backend>>) -> Self {
        Self { devices, shares: Vec::new(), programs: Vec::new(), profiling: false, profile: None }
    }

    fn refused(&self, what: impl Into<String>) -> Error {
        Error::Device { device: self.describe(), what: what.into() }
    }
}

impl Backend for Split {
    fn describe(&self) -> String {
        let devices: Vec<String> = self.devices.iter().map(|device| device.describe()).collect();
        devices.join(" and ")
    }

    fn load(
        &mut self,
        graph: &Graph,
        checkpoint: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> Result<()> {
        let (placed, held) = (options.placement.devices(), self.devices.len());
        if placed > held {
            return Err(self.refused(format!("a placement on {placed} devices, but there are {held}")));
        }
        self.programs.clear();
        self.shares = (0..held).map(|device| Share::of(graph, &options.placement, device)).collect();
        for (device, share) in self.devices.iter_mut().zip(&self.shares) {
            device.load(&share.graph, checkpoint.clone(), options, kv.clone())?;
        }
        Ok(())
    }

    fn prepare(&mut self, program: Arc<Program>) -> Result<Prepared> {
        let mut parts = Vec::with_capacity(program.segments.len());
        let mut owners = HashMap::new();
        for (at, segment) in program.segments.iter().enumerate() {
            let device = segment.device;
            let (Some(backend), Some(share)) = (self.devices.get_mut(device), self.shares.get(device)) else {
                return Err(self.refused(format!("segment {at} is placed on device {device}")));
            };
            let Part { program: part, wants, writes } = Part::of(&program, at, share)?;
            owners.extend(writes.into_iter().enumerate().map(|(own, index)| (index, (at, own))));
            let prepared = backend.prepare(Arc::new(part))?;
            parts.push(Placed { device, prepared, wants });
        }
        self.programs.push(Ready { program, parts, owners, ran: false });
        Ok(Prepared(self.programs.len() - 1))
    }

    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> Result<()> {
        let Some(ready) = self.programs.get_mut(prepared.0) else {
            return Err(self.refused(format!("program {} is not prepared", prepared.0)));
        };
        ready.ran = false;
        let mut inputs = inputs.clone();
        let (mut times, mut nodes) = (Vec::new(), 0);
        for part in &ready.parts {
            inputs.carried.clear();
            for want in &part.wants {
                let (of, own) = ready.owners[want];
                let Placed { device, prepared, .. } = ready.parts[of];
                inputs.carried.push(self.devices[device].read(prepared, own)?.to_vec());
            }
            let device = &mut self.devices[part.device];
            device.run(part.prepared, &inputs)?;
            if let Some(profile) = device.profile().filter(|_| self.profiling) {
                times.extend(&profile.times);
                nodes += profile.nodes;
            }
        }
        ready.ran = true;
        if self.profiling {
            inputs.carried.clear();
            self.profile = Some(Profile { program: ready.program.clone(), inputs, times, nodes });
        }
        Ok(())
    }

    fn read(&mut self, prepared: Prepared, output: usize) -> Result<&[f32]> {
        let ready = self.programs.get(prepared.0).filter(|ready| ready.ran);
        let Some(ready) = ready else {
            return Err(self.refused("this program has not run, or its last run failed"));
        };
        let Some(&(of, own)) = ready.owners.get(&output) else {
            let outputs = ready.program.outputs.len();
            return Err(self.refused(format!("output {output} of {outputs}")));
        };
        let Placed { device, prepared, .. } = ready.parts[of];
        self.devices[device].read(prepared, own)
    }

    fn set_profile(&mut self, on: bool) {
        self.profiling = on;
        self.devices.iter_mut().for_each(|device| device.set_profile(on));
    }

    fn profile(&self) -> Option<&Profile> {
        // A device that times nothing leaves a gap: then there is no profile.
        self.profile.as_ref().filter(|profile| profile.times.len() == profile.program.steps().count())
    }

    fn paths(&self) -> Vec<PathCount> {
        self.devices.iter().flat_map(|device| device.paths()).collect()
    }
}
