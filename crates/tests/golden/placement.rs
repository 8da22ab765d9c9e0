//! How many layers a device's memory holds: from exact bytes, and with the CPU's bits wherever the model is cut.

use std::sync::Arc;

use ingle_cuda::budget::{Fit, occupied};
use ingle_cuda::kernels::attention::COUNTER_BYTES;
use ingle_cuda::stand_in::StandIn;
use ingle_engine::runner::{Runner, kv_plan_of_all};
use ingle_graph::split::Split;
use ingle_graph::{Activations, Backend, Bucket, KvType, PlanOptions};
use ingle_models::Model;

use super::checkpoint;
use super::cuda::{logits, open};
use crate::cpu;

/// The buckets of [`logits`]' steps, the largest last.
const BUCKETS: [(usize, usize, usize); 5] = [(1, 1, 1), (2, 2, 2), (4, 4, 4), (32, 1, 32), (64, 2, 64)];

/// One that is as large in everything as any.
const LARGEST: (usize, usize, usize) = (64, 4, 64);

fn bucket((t, s, r): (usize, usize, usize)) -> Bucket {
    Bucket { t, s, r }
}

/// As many layers as a limit allows: with the bytes that a cut takes there is this cut, with one less there is one layer
/// less; what is allocated is what was planned; and all have the bits of the CPU alone.
#[test]
fn memory_limits_give_none_some_and_all_layers() {
    let Some(device) = StandIn::new("layers split by memory") else { return };
    for (path, kv_type, activations) in [
        ("gguf/llama-s1/model-legacy.gguf", KvType::F16, Activations::Int8),
        ("gguf/gemma2-s1/model-q8_0.gguf", KvType::Q8_0, Activations::Int8),
        ("gguf/qwen3-s1-wide/model-q4_k_m.gguf", KvType::F32, Activations::F32),
        ("models/llama_tied_bias", KvType::BF16, Activations::Int8),
    ] {
        let checkpoint = checkpoint(path);
        let model = Arc::new(Model::open(&checkpoint).expect("a fixture"));
        let options = PlanOptions { kv: kv_type, activations, ..PlanOptions::default() };
        let kv = kv_plan_of_all(&model.graph, 256, 3);
        let load = |backend, options| {
            Runner::new(backend, model.clone(), checkpoint.clone(), options, kv.clone()).expect("it fits")
        };
        let want = logits(&mut load(cpu(1, None), options.clone()));
        let granularity = open(&device, true).room().expect("told").granularity;
        let buckets: Vec<Bucket> = BUCKETS.into_iter().map(bucket).collect();
        let planned: Vec<Bucket> = buckets.iter().copied().chain([bucket(LARGEST)]).collect();
        let fit = |bytes: u64| {
            Fit::new(&model.graph, &options, &kv, &planned, granularity, bytes).expect("it compiles")
        };
        let most = fit(u64::MAX);
        assert!(most.is_whole() && most.needs == most.most, "{path}: {most:?}");
        let mut bytes = most.most.total();
        for held in (0..=most.layers).rev() {
            let less = fit(bytes - 1);
            assert_eq!(
                (less.held, less.is_whole()),
                (held, false),
                "{path}: {bytes} bytes less one, {less:?}"
            );
            bytes = less.needs.total();
            if held == 0 {
                break;
            }
            assert_eq!(fit(bytes).held, held, "{path}: {bytes} bytes");
            let gpu = open(&device, true);
            let devices: Vec<Box<dyn Backend>> = vec![Box::new(gpu), cpu(1, None)];
            device.calls();
            let options = PlanOptions { placement: less.placement(), ..options.clone() };
            let mut split = load(Box::new(Split::new(devices)), options);
            assert!(logits(&mut split) == want, "{path}: {held} layers on the GPU");
            split.prepare(bucket(LARGEST)).expect("prepares");
            let taken: u64 = device.calls().iter().filter_map(|call| taken(call)).sum();
            assert_eq!(taken, bytes, "{path}: {held} layers, planned {}", less.needs);
        }
        assert_eq!(fit(most.least.total() - 1).held, 0, "{path}");
    }
}

/// Bytes that a call of the driver took of the device's memory.
fn taken(call: &str) -> Option<u64> {
    let (what, bytes) = call.split_once(' ')?;
    match what {
        "allocate" => Some(occupied(bytes.parse().ok()?)),
        "create" => bytes.parse().ok(),
        _ => None,
    }
}

/// A cut runs on a device that has just its bytes; with less, loading fails with the numbers.
#[test]
fn a_cut_runs_in_the_memory_it_was_made_for() {
    let Some(device) = StandIn::new("a cut in just its memory") else { return };
    let checkpoint = checkpoint("gguf/gemma3_text-s1/model-q8_0.gguf");
    let model = Arc::new(Model::open(&checkpoint).expect("a fixture"));
    let kv = kv_plan_of_all(&model.graph, 256, 3);
    let buckets: Vec<Bucket> = BUCKETS.into_iter().chain([LARGEST]).map(bucket).collect();
    let run = |memory: usize| {
        device.set_memory(memory);
        let gpu = open(&device, true);
        let room = gpu.room().expect("told");
        let options = PlanOptions::default();
        let fit = Fit::new(&model.graph, &options, &kv, &buckets, room.granularity, room.bytes(None))
            .expect("compiles");
        let options = PlanOptions { placement: fit.placement(), ..options };
        let split: Box<dyn Backend> = Box::new(Split::new(vec![Box::new(gpu), cpu(1, None)]));
        let runner = Runner::new(split, model.clone(), checkpoint.clone(), options, kv.clone());
        (fit, logits(&mut runner.expect("it fits")))
    };
    let (whole, want) = run(64 << 20);
    assert!(whole.is_whole());
    let mut held = Vec::new();
    for share in [0, 1, 2, 3] {
        // Between the least and the most, what is left to the driver, and what a device takes without a model.
        let bytes = whole.least.total() + share * (whole.most.total() - whole.least.total()) / 4;
        let (fit, got) = run((bytes + bytes / 31 + 4096) as usize + COUNTER_BYTES);
        assert!(got == want, "{fit:?}");
        held.push(fit.held);
    }
    assert!(held.is_sorted() && held[0] >= 1 && held[3] > held[0] && held[3] <= whole.layers, "{held:?}");
}
