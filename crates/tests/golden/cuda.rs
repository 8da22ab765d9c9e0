//! Whole models on the CUDA backend, on the stand-in that runs its kernels on the host: bits of the CPU, graphs that were
//! proved, and what happens when something in the way of a graph fails.

use std::sync::Arc;

use ingle_cuda::stand_in::{Fault, StandIn};
use ingle_cuda::{Cuda, CudaOptions};
use ingle_engine::batch::{self, Part};
use ingle_engine::kv::Span;
use ingle_engine::parity;
use ingle_engine::runner::{Open, Plan, Runner};
use ingle_graph::backend::PathCount;
use ingle_graph::options::Placement;
use ingle_graph::reference::Interpreter;
use ingle_graph::sample::Sampling;
use ingle_graph::split::Split;
use ingle_graph::{Backend, FloatArithmetic, Inputs, KvInputs, KvType, Numerics, PlanOptions};
use ingle_tensor::Checkpoint;

use super::{checkpoint, fixture, runner};
use crate::cpu;

/// The stand-in as a backend.
pub fn open(device: &StandIn, eager: bool) -> Cuda {
    let options = CudaOptions { search: device.search(), eager, ..CudaOptions::default() };
    Cuda::on(device.driver(), &options).expect("the stand-in opens")
}

/// Small models in mixed formats and in float ones, prompt and generated tokens: every hidden state and logit has the CPU's bits.
#[test]
fn a_model_has_the_bits_of_the_cpu() {
    let Some(device) = StandIn::new("a whole model on CUDA") else { return };
    for path in ["gguf/qwen3-s1-wide/model-q4_k_m.gguf", "models/qwen3"] {
        let checkpoint = Arc::new(Checkpoint::open(&fixture(path)).expect("a fixture"));
        let mut host = |plan: Plan<'_>| {
            plan.options.sample = false;
            Ok(cpu(1, None))
        };
        let open: [&mut Open<'_>; 2] = [&mut host, &mut |_| Ok(Box::new(open(&device, false)))];
        let parity = parity::devices(&checkpoint, PlanOptions::default(), EXACT, 3, open, &mut |_, _| ());
        let parity = parity.expect("both run");
        assert_eq!(parity.first, None, "{path}: {parity:?}");
        assert!(parity.steps > 3 && parity.values > 100_000, "{path}: {parity:?}");
        assert_eq!(parity.tokens, parity.steps, "{path}: {parity:?}");
        assert_eq!((parity.replays, &parity.declined), (3, &Vec::new()), "{path}: {parity:?}");
    }
}

/// Both devices in exact mode.
const EXACT: [Numerics; 2] = [Numerics::Exact; 2];

/// In fast mode attention runs in `mma`, and logits are close to the CPU's; with a launch left out they are not. Replays have the
/// bits of eager execution there too.
#[test]
fn a_model_in_fast_mode_is_close_to_the_cpu() {
    let Some(device) = StandIn::new("a whole model in fast mode") else { return };
    let checkpoint =
        Arc::new(Checkpoint::open(&fixture("gguf/qwen3-s1-wide/model-q4_k_m.gguf")).expect("a fixture"));
    let mut host = |plan: Plan<'_>| {
        plan.options.sample = false;
        Ok(cpu(1, None))
    };
    let fast = |eager| {
        let device = &device;
        move |plan: Plan<'_>| {
            plan.options.float = ingle_cuda::float_for(plan.options.numerics, plan.graph, plan.options.kv);
            assert_eq!(plan.options.float, FloatArithmetic::Mma);
            Ok(Box::new(open(device, eager)) as Box<dyn Backend>)
        }
    };
    let compare = |first: &mut Open<'_>, modes: [Numerics; 2]| {
        let open: [&mut Open<'_>; 2] = [first, &mut fast(false)];
        parity::devices(&checkpoint, PlanOptions::default(), modes, 3, open, &mut |_, _| ())
            .expect("both run")
    };
    let parity = compare(&mut host, [Numerics::Exact, Numerics::Fast]);
    let closeness = parity.closeness.clone().expect("closeness in place of bits");
    assert!(closeness.passed() && parity.first.is_none(), "{parity:?}");
    assert!(closeness.mean > 0.0 && closeness.first_layer > 0.0, "another arithmetic: {closeness:?}");
    assert!(closeness.positions > 100 && parity.tokens == parity.steps, "{parity:?}");
    device.lose_launch(9);
    let lost = compare(&mut host, [Numerics::Exact, Numerics::Fast]).closeness.expect("closeness");
    assert!(!lost.passed(), "a launch was left out: {lost:?}");
    let replayed = compare(&mut fast(true), [Numerics::Fast; 2]);
    assert_eq!((replayed.first, replayed.closeness, replayed.replays), (None, None, 3));
}

/// Memory to pin and clear is what takes long when a small model is loaded: it is twice its largest matrix, and given back.
#[test]
fn a_small_model_loads_with_little_pinned_memory() {
    let Some(device) = StandIn::new("pinned memory of a small model") else { return };
    let checkpoint = checkpoint("gguf/llama-s1/model-legacy.gguf");
    let largest = checkpoint.tensors().iter().map(|tensor| checkpoint.data(tensor).len()).max();
    let gpu = open(&device, true);
    device.calls();
    let _runner = runner("gguf/llama-s1/model-legacy.gguf", Box::new(gpu), PlanOptions::default(), 1);
    let calls = device.calls();
    let pinned: Vec<usize> =
        calls.iter().filter_map(|call| call.strip_prefix("pin ")?.parse().ok()).collect();
    let most = 2 * largest.expect("it has tensors");
    assert!(pinned.len() == 2 && pinned.iter().all(|&bytes| bytes > 0 && bytes <= most), "{pinned:?} {most}");
    assert_eq!(calls.iter().filter(|call| *call == "unpin").count(), 2);
}

/// Where graphs are compared with eager execution, one that was not used is told: nothing would have been compared.
#[test]
fn a_graph_that_is_not_used_is_told_to_who_compares() {
    let Some(device) = StandIn::new("a comparison without graphs") else { return };
    let checkpoint =
        Arc::new(Checkpoint::open(&fixture("gguf/llama-s1/model-legacy.gguf")).expect("a fixture"));
    device.fail("end", 0, 901);
    let devices: [&mut Open<'_>; 2] =
        [&mut |_| Ok(Box::new(open(&device, true))), &mut |_| Ok(Box::new(open(&device, false)))];
    let parity = parity::devices(&checkpoint, PlanOptions::default(), EXACT, 2, devices, &mut |_, _| ());
    let parity = parity.expect("both run");
    assert_eq!((parity.first, parity.replays), (None, 0));
    assert!(parity.declined[0].starts_with("graph.t1s1r1: cuStreamEndCapture"), "{:?}", parity.declined);
}

/// Logits, as bits, of a prompt for each of three sequences and of decoding them: one, then two, then three together, over
/// the border of a page.
pub fn logits(runner: &mut Runner) -> Vec<Vec<u32>> {
    let vocabulary = runner.model().config.vocabulary as u32;
    let tokens = |s: u32| (0..40).map(|i| (i * 37 + 11 + s * 101) % vocabulary).collect::<Vec<u32>>();
    let tokens = [0, 1, 2].map(tokens);
    let groups = runner.kv().pages.len();
    let pages = |s: u32| vec![Span { first: 0, pages: [1 + 2 * s, 2 + 2 * s].into() }; groups];
    let spans = [0, 1, 2].map(pages);
    let mut inputs = Inputs::default();
    let mut step = |parts: &[(usize, usize, usize)]| {
        let part = |&(s, computed, n): &(usize, usize, usize)| Part {
            tokens: &tokens[s],
            computed,
            n,
            spans: &spans[s],
            all_rows: true,
        };
        let parts: Vec<Part<'_>> = parts.iter().map(part).collect();
        batch::fill(&mut inputs, &parts, &vec![2; groups]);
        runner.run(&inputs).expect("runs");
        runner.output("logits").expect("logits").iter().map(|x| x.to_bits()).collect()
    };
    let mut all: Vec<Vec<u32>> = vec![step(&[(0, 0, 29)]), step(&[(1, 0, 7), (2, 0, 30)])];
    all.extend((29..31).map(|at| step(&[(0, at, 1)])));
    all.extend((31..33).map(|at| step(&[(0, at, 1), (1, at - 24, 1)])));
    all.extend((33..36).map(|at| step(&[(0, at, 1), (1, at - 24, 1), (2, at - 3, 1)])));
    all
}

/// Each fault of a replay, and of the proof itself, is found before a graph is used: the bucket runs eagerly, with the CPU's bits,
/// and says why. Without a fault the same graphs are replayed.
#[test]
fn planted_faults_fail_the_proof() {
    let Some(device) = StandIn::new("proofs of graphs with planted faults") else { return };
    let path = "gguf/llama-s1/model-legacy.gguf";
    let want = logits(&mut runner(path, cpu(1, None), PlanOptions::default(), 3));
    let differs = "replay differs from eager execution in ";
    for (fault, why) in [
        (Fault::None, None),
        (Fault::EmptyReplay, Some(differs)),
        (Fault::ShortReplay, Some(differs)),
        (Fault::FrozenData, Some(differs)),
        (Fault::NoFill, Some("what a step writes could not be poisoned")),
    ] {
        let gpu = open(&device, false);
        device.plant(fault);
        let mut gpu = runner(path, Box::new(gpu), PlanOptions::default(), 3);
        assert!(logits(&mut gpu) == want, "{fault:?}");
        device.plant(Fault::None);
        let of_prompt = |graph: &PathCount| graph.declined.as_deref() == Some("a prompt runs once");
        let graphs: Vec<_> = graphs(&mut gpu).into_iter().filter(|graph| !of_prompt(graph)).collect();
        assert_eq!(graphs.len(), 3, "{fault:?}: {graphs:?}");
        for graph in graphs {
            let found = graph.declined.as_deref();
            let right = match (found, why) {
                (None, None) => graph.count > 0,
                (Some(found), Some(why)) => found.starts_with(why),
                _ => false,
            };
            assert!(right, "{fault:?}: {graph:?}");
        }
    }
}

/// With what every launch writes poisoned before it, whole models have the same bits, eagerly and replayed; and a launch that
/// does nothing shows, whichever it is, where without poison it may not: the step before left the same there.
#[test]
fn a_launch_that_does_nothing_shows() {
    let Some(device) = StandIn::new("launches that do nothing") else { return };
    device.set_multiprocessors(2);
    let backend = |eager, poison| -> Box<dyn Backend> {
        let options = CudaOptions { search: device.search(), eager, poison, ..CudaOptions::default() };
        Box::new(Cuda::on(device.driver(), &options).expect("the stand-in opens"))
    };
    for (path, rows) in [("gguf/qwen3-s1/model-legacy.gguf", 1), ("models/gemma2", 1), ("models/qwen2", 2)] {
        let options = PlanOptions { sample: true, ..PlanOptions::default() };
        let want = logits(&mut runner(path, cpu(1, None), PlanOptions::default(), 3));
        let mut gpu = runner(path, backend(false, true), options.clone(), 3);
        assert!(logits(&mut gpu) == want, "{path}: poisoned");
        let replays: u64 = graphs(&mut gpu).iter().filter(|g| g.declined.is_none()).map(|g| g.count).sum();
        assert_eq!(replays, 7, "{path}");
        let unseen = |poison| {
            let mut gpu = runner(path, backend(true, poison), options.clone(), rows);
            let groups = gpu.kv().pages.len();
            let each = |n: u32| (0..rows as u32).map(move |row| n + row);
            let inputs = |position: u32| Inputs {
                tokens: each(7 + position).collect(),
                positions: vec![position; rows],
                sequences: each(0).collect(),
                kv: vec![
                    KvInputs {
                        cells: each(1).map(|page| 32 * page + position).collect(),
                        tables: each(1).collect(),
                        table_stride: 1,
                    };
                    groups
                ],
                wanted: each(0).collect(),
                sampling: vec![Some(Sampling::greedy()); rows],
                ..Inputs::default()
            };
            (0..4).for_each(|position| drop(step(&mut gpu, &inputs(position))));
            let inputs = inputs(4);
            let first = step(&mut gpu, &inputs);
            assert!(first.iter().all(|&x| f32::from_bits(x).is_finite()), "{path}: {rows} rows");
            device.calls();
            assert!(step(&mut gpu, &inputs) == first, "{path}: {rows} rows");
            let launches = device.calls().iter().filter(|call| call.starts_with("launch")).count();
            assert!(launches > 20, "{launches}");
            let is_unseen = |&after: &usize| {
                device.lose_launch(after);
                let lost = step(&mut gpu, &inputs);
                assert!(step(&mut gpu, &inputs) == first, "{path}: {rows} rows after launch {after}");
                lost == first
            };
            (0..launches).filter(is_unseen).collect::<Vec<_>>()
        };
        assert_eq!(unseen(true), [0; 0], "{path}: {rows} rows");
        let control = rows == 2 && !cfg!(debug_assertions);
        assert!(!control || !unseen(false).is_empty(), "{path}: {rows} rows");
    }
}

/// The results of a step, as bits, NaN as one NaN.
fn step(runner: &mut Runner, inputs: &Inputs) -> Vec<u32> {
    runner.run(inputs).expect("runs");
    let mut all = Vec::new();
    for name in runner.outputs() {
        let values = runner.output(&name).expect("a result");
        all.extend(values.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }));
    }
    all
}

/// An error at any launch of a window ends the capture; the step runs eagerly, with the CPU's bits, and says what failed.
#[test]
fn an_error_at_any_launch_of_a_window_ends_the_capture() {
    let Some(device) = StandIn::new("errors at every launch of a window") else { return };
    let path = "gguf/llama-s1/model-legacy.gguf";
    let first = |runner: &mut Runner| -> Vec<u32> {
        let inputs = Inputs {
            tokens: vec![7],
            positions: vec![0],
            sequences: vec![0],
            kv: vec![KvInputs { cells: vec![32], tables: vec![1, 1], table_stride: 2 }],
            wanted: vec![0],
            ..Inputs::default()
        };
        runner.run(&inputs).expect("runs");
        runner.output("logits").expect("logits").iter().map(|x| x.to_bits()).collect()
    };
    let want = first(&mut runner(path, cpu(1, None), PlanOptions::default(), 1));
    let run = |fails: Option<usize>| {
        let mut gpu = runner(path, Box::new(open(&device, false)), PlanOptions::default(), 1);
        device.calls();
        if let Some(after) = fails {
            device.fail("launch", after, 719);
        }
        assert!(first(&mut gpu) == want, "{fails:?}");
        graphs(&mut gpu).swap_remove(0).declined
    };
    assert_eq!(run(None), None);
    let calls = device.calls();
    let begin = calls.iter().position(|call| call.starts_with("begin")).expect("a window");
    let window = calls[begin..].iter().take_while(|call| !call.starts_with("end"));
    let launches = window.filter(|call| call.starts_with("launch")).count();
    assert!(launches > 20, "{launches}");
    for after in 0..launches {
        let why = run(Some(after)).unwrap_or_else(|| panic!("launch {after} of {launches}"));
        let failed = why.starts_with("launch of ") && why.contains("CUDA_ERROR_LAUNCH_FAILED");
        assert!(failed, "launch {after}: {why}");
    }
}

/// Attention in `mma`: a whole prompt, prompts of several sequences in a step, and sequences decoded alone and together have
/// the reference's bits, with a softcap and with windows too.
#[test]
fn a_model_in_mma_has_the_bits_of_the_reference() {
    let Some(device) = StandIn::new("a whole model in mma") else { return };
    for path in ["gguf/qwen3-s1-wide/model-q4_k_m.gguf", "gguf/gemma2-s1/model-q8_0.gguf", "models/qwen2_swa"]
    {
        for kv in [KvType::F16, KvType::BF16] {
            let options = PlanOptions { float: FloatArithmetic::Mma, kv, ..PlanOptions::default() };
            let mut gpu = runner(path, Box::new(open(&device, false)), options.clone(), 3);
            assert_eq!(
                ingle_cuda::float_for(Numerics::Fast, &gpu.model().graph, kv),
                options.float,
                "{path}"
            );
            let want = logits(&mut runner(path, Box::new(Interpreter::new()), options, 3));
            assert!(logits(&mut gpu) == want, "{path} in {kv}");
            let graphs = graphs(&mut gpu);
            assert!(graphs.iter().any(|graph| graph.count > 0 && graph.declined.is_none()), "{graphs:?}");
        }
    }
}

/// Graphs of a runner: each with its replays, or why it is not used.
pub fn graphs(runner: &mut Runner) -> Vec<PathCount> {
    runner.backend().paths().into_iter().filter(|path| path.path.starts_with("graph.")).collect()
}

/// A model on the GPU, the CPU and the GPU again, cut at several points: each GPU segment of a decode step has a graph of
/// its own, and replayed and eager they have the bits of the CPU alone.
#[test]
fn layers_on_gpu_cpu_and_gpu_have_the_bits_of_the_cpu() {
    let Some(device) = StandIn::new("layers on GPU, CPU and GPU") else { return };
    for (path, cuts) in [
        ("gguf/llama-s1/model-legacy.gguf", vec![[(0, 0), (1, 1), (2, 0)]]),
        ("gguf/gemma3_text-s1/model-q8_0.gguf", vec![[(0, 0), (1, 1), (2, 0)], [(0, 0), (2, 1), (3, 0)]]),
        ("models/qwen2_swa", vec![[(0, 0), (1, 1), (2, 0)]]),
    ] {
        let want = logits(&mut runner(path, cpu(1, None), PlanOptions::default(), 3));
        for cut in cuts {
            let split = |eager| {
                let devices = vec![Box::new(open(&device, eager)) as Box<dyn Backend>, cpu(1, None)];
                let options = PlanOptions { placement: Placement::of(&cut), ..PlanOptions::default() };
                runner(path, Box::new(Split::new(devices)), options, 3)
            };
            let (mut eager, mut captured) = (split(true), split(false));
            assert!(logits(&mut eager) == want, "{path}: eager, cut at {cut:?}");
            assert!(logits(&mut captured) == want, "{path}: replayed, cut at {cut:?}");
            let graphs = graphs(&mut captured);
            for (bucket, replays) in [("t1s1r1", 2), ("t2s2r2", 2), ("t4s4r4", 3)] {
                for segment in [0, 2] {
                    let path = format!("graph.{bucket}.segment{segment}");
                    let count = graphs.iter().find(|graph| graph.path == path);
                    let count = count.unwrap_or_else(|| panic!("{path}: none of {graphs:?}"));
                    assert_eq!((&count.declined, count.count), (&None, replays), "{path}, cut at {cut:?}");
                }
            }
        }
    }
}

/// What one GPU segment's graph meets is that segment's alone: it runs eagerly, says why, and the other is replayed.
#[test]
fn a_segment_whose_capture_fails_runs_eagerly() {
    let Some(device) = StandIn::new("a segment without a graph") else { return };
    let path = "gguf/llama-s1/model-legacy.gguf";
    let want = logits(&mut runner(path, cpu(1, None), PlanOptions::default(), 3));
    let devices = vec![Box::new(open(&device, false)) as Box<dyn Backend>, cpu(1, None)];
    let placement = Placement::of(&[(0, 0), (1, 1), (2, 0)]);
    let options = PlanOptions { placement, ..PlanOptions::default() };
    let mut split = runner(path, Box::new(Split::new(devices)), options, 3);
    device.fail("end", 1, 901);
    assert!(logits(&mut split) == want);
    let graphs = graphs(&mut split);
    let of = |segment: usize| {
        let path = format!("graph.t1s1r1.segment{segment}");
        graphs.iter().find(|graph| graph.path == path).unwrap_or_else(|| panic!("{path}: none of {graphs:?}"))
    };
    assert_eq!((&of(0).declined, of(0).count), (&None, 2));
    let why = of(2).declined.as_ref().unwrap_or_else(|| panic!("{graphs:?}"));
    assert!(why.contains("cuStreamEndCapture"), "{why}");
}
