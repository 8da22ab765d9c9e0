//! Every switch is part of the plan key, both ways, and no fusion changes a bit.

use std::collections::HashSet;
use std::sync::Arc;

use ingle_engine::batch;
use ingle_engine::kv::Span;
use ingle_engine::runner::kv_plan_of_all;
use ingle_graph::backend::PathCount;
use ingle_graph::options::{FloatArithmetic, Placement};
use ingle_graph::reference::Interpreter;
use ingle_graph::split::{Part, Share, Split};
use ingle_graph::{
    Activations, Backend, Bucket, Graph, Inputs, KvPlan, KvType, Numerics, Op, PlanKey, PlanOptions,
    Prepared, Profile, Program, dump, passes,
};
use ingle_models::Model;
use ingle_tensor::Checkpoint;

use super::{MODELS, checkpoint, runner, spans};
use crate::{cpu, devices};

/// A field of the options with its default and another value.
struct Field {
    name: &'static str,
    default: fn(&mut PlanOptions),
    other: fn(&mut PlanOptions),
}

macro_rules! fields {
    ($($name:ident: $default:expr, $other:expr;)+) => {
        // Destructured in full: a new field does not compile until it has a row here.
        fn exhaustive(options: &PlanOptions) {
            let PlanOptions { $($name: _),+ } = options;
        }
        const FIELDS: &[Field] = &[$(Field {
            name: stringify!($name),
            default: |o| o.$name = $default,
            other: |o| o.$name = $other,
        }),+];
    };
}

fields! {
    numerics: Numerics::Fast, Numerics::Exact;
    float: FloatArithmetic::F32x32, FloatArithmetic::Amx3;
    activations: Activations::Int8, Activations::Int16;
    kv: KvType::F16, KvType::F32;
    fuse_qkv: true, false;
    fuse_gate_up: true, false;
    fuse_quantize: true, false;
    fuse_rope_store: true, false;
    fuse_residual: true, false;
    fuse_gated: true, false;
    taps: false, true;
    sample: false, true;
    placement: Placement::of(&[(0, 0)]), Placement::of(&[(0, 0), (1, 1)]);
}

fn gates() -> impl Iterator<Item = &'static Field> {
    FIELDS.iter().filter(|f| f.name.starts_with("fuse_"))
}

#[test]
fn each_field_flips_the_key_both_ways() {
    let bucket = Bucket::holding(1, 1, 1);
    let key = |options: &PlanOptions| PlanKey { bucket, options: options.clone() };
    let default = PlanOptions::default();
    exhaustive(&default);
    let mut opposite = default.clone();
    FIELDS.iter().for_each(|f| (f.other)(&mut opposite));
    let mut keys = HashSet::from([key(&default), key(&opposite)]);
    for field in FIELDS {
        let mut options = default.clone();
        (field.other)(&mut options);
        assert!(keys.insert(key(&options)), "{}: the other value has the default's key", field.name);
        (field.default)(&mut options);
        assert_eq!(key(&options), key(&default), "{}: set and set back", field.name);
        let mut options = opposite.clone();
        (field.default)(&mut options);
        assert!(keys.insert(key(&options)), "{}: the default value has the other's key", field.name);
        (field.other)(&mut options);
        assert_eq!(key(&options), key(&opposite), "{}: set back and set", field.name);
    }
    for bucket in [Bucket::holding(2, 1, 1), Bucket::holding(1, 2, 1), Bucket::holding(1, 1, 2)] {
        assert!(keys.insert(PlanKey { bucket, options: default.clone() }));
    }
}

/// Each fusion gate changes the program it is meant to change: fewer steps with it than without.
#[test]
fn each_gate_has_an_effect() {
    let checkpoint = checkpoint("gguf/llama-s1/model-legacy.gguf");
    let model = Model::open(&checkpoint).expect("a fixture");
    let bucket = Bucket::holding(8, 1, 1);
    let steps = |options: PlanOptions| {
        let program = passes::compile(&model.graph, &PlanKey { bucket, options }).expect("compiles");
        let text = dump::program_text(&program);
        let heads = 1 + program.kv_groups.len() + program.segments.len();
        assert_eq!(text.lines().count(), program.steps().count() + heads);
        program.steps().count()
    };
    let fused = steps(PlanOptions::default());
    for gate in gates() {
        let mut options = PlanOptions::default();
        (gate.other)(&mut options);
        assert!(steps(options) > fused, "{}: no step more without it", gate.name);
    }
    assert!(steps(PlanOptions::default().unfused()) > fused);
}

/// Logits of a prompt of 40 tokens and of three steps of decoding after it.
fn logits(runner: &mut ingle_engine::runner::Runner) -> Vec<u32> {
    let tokens: Vec<u32> = (0..43).map(|i| (i * 37 + 11) % 500).collect();
    let spans = spans(runner, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let mut inputs = Inputs::default();
    let mut bits = Vec::new();
    for (computed, n) in [(0, 40), (40, 1), (41, 1), (42, 1)] {
        let part = batch::Part { tokens: &tokens, computed, n, spans: &spans, all_rows: true };
        batch::fill(&mut inputs, &[part], &vec![8; spans.len()]);
        runner.run(&inputs).expect("runs");
        bits.extend(runner.output("logits").expect("logits").iter().map(|x| x.to_bits()));
    }
    bits
}

#[test]
fn fused_equals_unfused() {
    for path in MODELS {
        let want = logits(&mut runner(path, Box::new(Interpreter::new()), PlanOptions::default(), 1));
        assert!(want.iter().any(|&b| f32::from_bits(b).abs() > 1.0), "{path}: empty logits");
        for device in devices().into_iter().rev().filter_map(|d| d.open().map(|_| d)).take(1) {
            let arm = |options: PlanOptions| {
                logits(&mut runner(path, device.open().expect("opened before"), options, 1))
            };
            assert!(arm(PlanOptions::default()) == want, "{path}: {device} differs from the reference");
            assert!(arm(PlanOptions::default().unfused()) == want, "{path}: {device}, unfused");
            for gate in gates() {
                let mut options = PlanOptions::default();
                (gate.other)(&mut options);
                assert!(arm(options) == want, "{path}: {device} without {}", gate.name);
            }
        }
    }
}

/// A program for several devices has the bits of one: as a whole, with copies between its segments, and in parts that run
/// on devices of their own, each with its share of the weights. A device may come twice.
#[test]
fn split_over_devices_equals_whole() {
    for path in [
        "models/llama",
        "models/qwen2_swa",
        "gguf/llama-s1/model-legacy.gguf",
        "gguf/gemma2-s1/model-q8_0.gguf",
        "gguf/gemma3_text-s1/model-q8_0.gguf",
    ] {
        let interpreter = || Box::new(Interpreter::new()) as Box<dyn Backend>;
        let want = logits(&mut runner(path, interpreter(), PlanOptions::default(), 1));
        let layers = Model::open(&checkpoint(path)).expect("a fixture").config.layers;
        for stretches in [
            vec![(0, 0), (1, 1)],
            vec![(0, 0), (1, 1), (2, 0)],
            vec![(0, 1), (1, 0)],
            vec![(0, 0), (layers, 1)],
            vec![(0, 2), (1, 0), (layers, 1)],
        ] {
            let placement = Placement::of(&stretches);
            let devices = (0..placement.devices()).map(|_| interpreter()).collect();
            for taps in [false, true] {
                let options = PlanOptions { placement: placement.clone(), taps, ..PlanOptions::default() };
                let mut whole = runner(path, interpreter(), options.clone(), 1);
                let program = whole.prepare(Bucket::holding(1, 1, 1)).expect("compiles");
                assert_eq!(program.segments.len(), stretches.len(), "{path}: {stretches:?}");
                assert!(logits(&mut whole) == want, "{path}: one device, {stretches:?}");
            }
            let options = PlanOptions { placement, ..PlanOptions::default() };
            let mut split = runner(path, Box::new(Split::new(devices)), options, 1);
            assert!(logits(&mut split) == want, "{path}: split at {stretches:?}");
            assert_eq!(split.outputs(), ["logits", "peaks"], "{path}: what is carried is no result");
        }
    }
}

/// What devices hold of a model is all of it, nothing twice but tables that both read; and each holds what it runs.
#[test]
fn shares_are_the_whole_model() {
    let checkpoint = checkpoint("gguf/gemma3_text-s1/model-q8_0.gguf");
    let graph = Model::open(&checkpoint).expect("a fixture").graph;
    let placement = Placement::of(&[(0, 0), (1, 1), (2, 0)]);
    let shares = [0, 1].map(|device| Share::of(&graph, &placement, device).graph);
    assert_eq!(shares[0].kv.len() + shares[1].kv.len(), graph.kv.len());
    assert_eq!(shares[1].kv.len(), 1);
    for weight in &graph.weights {
        let held = shares.iter().filter(|share| share.weights.contains(weight)).count();
        assert_eq!(held, 1, "{}", weight.name);
        let own = usize::from(weight.name.starts_with("blk.1."));
        assert!(shares[own].weights.contains(weight), "{} belongs to device {own}", weight.name);
    }
    assert!(Share::of(&graph, &placement, 2).is_empty());
}

/// A placement on more devices than there are, and a program of another placement, are refused by name.
#[test]
fn placements_that_do_not_fit_are_refused() {
    let checkpoint = checkpoint("gguf/llama-s1/model-legacy.gguf");
    let model = Model::open(&checkpoint).expect("a fixture");
    let options = |stretches| PlanOptions { placement: Placement::of(stretches), ..PlanOptions::default() };
    let interpreters = || (0..2).map(|_| Box::new(Interpreter::new()) as Box<dyn Backend>).collect();
    let kv = kv_plan_of_all(&model.graph, 64, 1);
    let mut split = Split::new(interpreters());
    let three = options(&[(0, 0), (1, 2)]);
    let error = split.load(&model.graph, checkpoint.clone(), &three, kv.clone()).expect_err("three devices");
    assert!(error.to_string().contains("a placement on 3 devices, but there are 2"), "{error}");
    let mut split = Split::new(interpreters());
    split.load(&model.graph, checkpoint, &options(&[(0, 0), (1, 1)]), kv).expect("two devices");
    let key = PlanKey { bucket: Bucket::holding(1, 1, 1), options: options(&[(0, 1), (1, 0)]) };
    let program = passes::compile(&model.graph, &key).expect("compiles");
    let error = split.prepare(Arc::new(program)).expect_err("the other way round").to_string();
    assert!(error.contains("is not of the share of device"), "{error}");
}

/// A part wants what others computed for it, in the step's own rows.
#[test]
fn a_part_without_what_it_wants_is_refused() {
    let checkpoint = checkpoint("gguf/llama-s1/model-legacy.gguf");
    let model = Model::open(&checkpoint).expect("a fixture");
    let options = PlanOptions { placement: Placement::of(&[(0, 0), (1, 1)]), ..PlanOptions::default() };
    let share = Share::of(&model.graph, &options.placement, 1);
    let kv = kv_plan_of_all(&model.graph, 64, 1);
    let key = PlanKey { bucket: Bucket::holding(2, 1, 1), options };
    let program = passes::compile(&model.graph, &key).expect("compiles");
    let Part { program: part, wants, writes } = Part::of(&program, 1, &share).expect("it is closed");
    assert!(
        program.outputs[wants[0]].is_carried() && writes.iter().all(|&at| !program.outputs[at].is_carried())
    );
    let width = model.config.hidden;
    let span = Span { first: 0, pages: [1, 2].into() };
    let mut inputs = Inputs::default();
    let parts = [batch::Part { tokens: &[1, 2], computed: 0, n: 2, spans: &[span], all_rows: false }];
    batch::fill(&mut inputs, &parts, &[2]);
    for (carried, said) in
        [(vec![], "0 carried values for "), (vec![vec![0.0; width]], ""), (vec![vec![0.0; 2 * width]], "ok")]
    {
        let found = carried.first().map_or(0, Vec::len);
        inputs.carried = carried;
        let checked = inputs.check(&part, &kv).map_or_else(|error| error.to_string(), |()| "ok".into());
        assert!(checked.contains(said), "{checked}");
        assert_eq!(checked == "ok", found == 2 * width, "{checked}");
    }
}

/// A device that passes on what others want of it with one bit too many in one value.
struct Bent(Interpreter, Vec<f32>);

impl Backend for Bent {
    fn describe(&self) -> String {
        self.0.describe()
    }
    fn load(
        &mut self,
        graph: &Graph,
        file: Arc<Checkpoint>,
        options: &PlanOptions,
        kv: KvPlan,
    ) -> ingle_graph::Result<()> {
        self.0.load(graph, file, options, kv)
    }
    fn prepare(&mut self, program: Arc<Program>) -> ingle_graph::Result<Prepared> {
        self.0.prepare(program)
    }
    fn run(&mut self, prepared: Prepared, inputs: &Inputs) -> ingle_graph::Result<()> {
        self.0.run(prepared, inputs)
    }
    fn read(&mut self, prepared: Prepared, output: usize) -> ingle_graph::Result<&[f32]> {
        self.1 = self.0.read(prepared, output)?.to_vec();
        let value = self.1.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())).expect("some");
        *value = f32::from_bits(value.to_bits() ^ 1);
        Ok(&self.1)
    }
    fn set_profile(&mut self, _: bool) {}
    fn profile(&self) -> Option<&Profile> {
        None
    }
    fn paths(&self) -> Vec<PathCount> {
        self.0.paths()
    }
}

/// The comparison of split and whole models sees one bit of one value that went from device to device.
#[test]
fn one_bit_of_a_carried_value_is_seen() {
    let path = "models/llama";
    let want = logits(&mut runner(path, Box::new(Interpreter::new()), PlanOptions::default(), 1));
    let options = PlanOptions { placement: Placement::of(&[(0, 0), (1, 1)]), ..PlanOptions::default() };
    let split = |first: Box<dyn Backend>| {
        let devices = vec![first, Box::new(Interpreter::new()) as Box<dyn Backend>];
        logits(&mut runner(path, Box::new(Split::new(devices)), options.clone(), 1))
    };
    assert!(split(Box::new(Interpreter::new())) == want);
    assert!(split(Box::new(Bent(Interpreter::new(), Vec::new()))) != want);
}

/// Times of the steps of all devices, in the order of the whole program's.
#[test]
fn a_split_times_every_step() {
    let options =
        PlanOptions { placement: Placement::of(&[(0, 0), (1, 1), (2, 0)]), ..PlanOptions::default() };
    let devices = vec![cpu(1, None), cpu(1, None)];
    let mut split = runner("gguf/llama-s1/model-legacy.gguf", Box::new(Split::new(devices)), options, 1);
    split.backend().set_profile(true);
    assert!(split.backend().profile().is_none());
    logits(&mut split);
    let profile = split.backend().profile().expect("CPUs time their steps");
    assert_eq!(profile.times.len(), profile.program.steps().count());
    assert!(profile.program.segments.len() == 3 && profile.times.iter().all(|time| time.seconds >= 0.0));
    assert!(profile.times.iter().map(|time| time.seconds).sum::<f64>() > 0.0);
}

/// Which inputs of quantized products have two digits: those of query, key and value whose weights have units of 256.
#[test]
fn activation_digits_follow_the_table() {
    let (mut one, mut two) = (0, 0);
    for path in ["gguf/qwen3-s1-wide/model-q4_k_m.gguf", "gguf/llama-s1/model-q8_0.gguf"] {
        let model = Model::open(&checkpoint(path)).expect("a fixture");
        let key = PlanKey { bucket: Bucket::holding(1, 1, 1), options: PlanOptions::default() };
        let graph = passes::optimize(&model.graph, &key).expect("compiles");
        for node in &graph.nodes {
            let Op::Linear { parts, .. } = &node.op else { continue };
            for part in parts {
                let weight = graph.weight(part.weight);
                let Some((unit, digits)) = graph.ty(node.inputs[part.input]).elem.digits() else { continue };
                assert_eq!(Some(unit), weight.unit(), "{path}: {}", weight.name);
                let coarse = ["attn_q.", "attn_k.", "attn_v."].iter().any(|kind| weight.name.contains(kind));
                let want = if unit == 256 && coarse { 2 } else { 1 };
                assert_eq!(digits, want, "{path}: {} ({})", weight.name, weight.dtype);
                *(if digits == 2 { &mut two } else { &mut one }) += 1;
            }
        }
    }
    assert!(one > 0 && two > 0, "{one} products with one digit and {two} with two");
}
