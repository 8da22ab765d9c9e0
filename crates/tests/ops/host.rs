//! What of ops no GPU has a part in: arithmetic of the CPU alone, kernels on the stand-in, the reference against itself.
//! `.ci/gpu` leaves out this file and `refusals.rs`, which run everywhere else.

use ingle_cuda::stand_in::StandIn;
use ingle_cuda::{Cuda, CudaOptions};
use ingle_graph::backend::PathCount;
use ingle_graph::reference::Interpreter;
use ingle_graph::{Backend, FloatArithmetic, KvType};
use ingle_tensor::DType;

use super::cases::{Case, cases};
use super::harness::{Difference, Rig, bits_equal};
use super::{check, served};

/// Only paths with matrix tiles run this; on a machine without them it is reported as not run. The reference is slow: of the
/// many rows with a long past only those run that were chosen for it.
#[test]
fn attention_bits_in_amx3() {
    let chosen = |case: &Case| match *case {
        Case::Attention { rows, past, apart, wild, .. } => {
            rows == 1 || wild.is_some() || (!apart && ![5, 40, 255, 300, 515].contains(&past))
        }
        _ => false,
    };
    check(FloatArithmetic::Amx3, chosen);
    // It is another arithmetic: a path that ran `f32x32` instead would have been seen.
    let differs = cases().iter().filter(|case| chosen(case) && case.rows() == 7).all(|case| {
        let run = |float| Rig::new(case).in_arithmetic(float).run(&mut Interpreter::new());
        bits_equal(&run(FloatArithmetic::Amx3), &run(FloatArithmetic::F32x32)).is_some()
    });
    assert!(differs);
}

/// On the stand-in, whose tensor cores add as the reference does: in both orders of threads, and with copies done at once and
/// late. Rows come alone, together, and as rows of several sequences.
#[test]
fn attention_bits_in_mma() {
    let Some(device) = StandIn::new("attention in mma") else { return };
    let options = CudaOptions { search: device.search(), ..CudaOptions::default() };
    let mut backend = Cuda::on(device.driver(), &options).expect("the stand-in opens");
    let mut runs = 0;
    for (n, case) in cases().iter().filter(|case| served(case)).enumerate() {
        device.set_reversed(n % 3 == 1);
        let rig = Rig::new(case).in_arithmetic(FloatArithmetic::Mma);
        let want = rig.run(&mut Interpreter::new());
        let got = rig.run(&mut backend);
        if let Some(Difference { at, got, want }) = bits_equal(&got, &want) {
            panic!(
                "{case}: {at}: {got:e} ({:08x}), reference {want:e} ({:08x})",
                got.to_bits(),
                want.to_bits()
            );
        }
        runs += 1;
    }
    assert!(runs > 50, "{runs}");
}

/// On a device with one multiprocessor a block of few rows walks all chunks and merges them as it goes, as it does anywhere in
/// steps of many sequences.
#[test]
fn attention_bits_of_blocks_that_walk_all_chunks() {
    let Some(device) = StandIn::new("attention with a block for all chunks") else { return };
    device.set_multiprocessors(1);
    let options = CudaOptions { search: device.search(), ..CudaOptions::default() };
    let mut backend = Cuda::on(device.driver(), &options).expect("the stand-in opens");
    let several = |case: &Case| match *case {
        Case::Attention { rows, past, wild, .. } => rows <= 2 && past > 256 && wild.is_none(),
        _ => false,
    };
    for float in [FloatArithmetic::F32x32, FloatArithmetic::Mma] {
        let cases = cases();
        let chosen = cases.iter().filter(|case| several(case));
        let chosen: Vec<_> = chosen.filter(|case| float == FloatArithmetic::F32x32 || served(case)).collect();
        assert!(chosen.len() >= 8, "{float}: {}", chosen.len());
        for case in chosen {
            let rig = Rig::new(case).in_arithmetic(float);
            let all = matches!(case, Case::Attention { window: Some(_), .. });
            let all = all.then(|| Rig::keeping_all(case).in_arithmetic(float));
            let want = all.as_ref().unwrap_or(&rig).run(&mut Interpreter::new());
            if let Some(Difference { at, got, want }) = bits_equal(&rig.run(&mut backend), &want) {
                panic!("{case} in {float}: {at}: {got:e}, reference {want:e}");
            }
        }
    }
}

/// What `mma` rounds away: its outputs are those of `f32x32` but for a few thousandths of the largest value. The largest part
/// is the queries', whose last bit is worth 2^-11 (2^-8 in bf16) of a score.
#[test]
fn mma_is_near_f32x32() {
    let (mut worst, mut differ) = ([0.0f32; 2], 0);
    for case in
        cases().iter().filter(|case| served(case) && matches!(case, Case::Attention { wild: None, .. }))
    {
        let run = |float| Rig::new(case).in_arithmetic(float).run(&mut Interpreter::new());
        let (rounded, exact) = (run(FloatArithmetic::Mma), run(FloatArithmetic::F32x32));
        differ += usize::from(bits_equal(&rounded, &exact).is_some());
        let Case::Attention { kv, .. } = *case else { continue };
        let worst = &mut worst[usize::from(kv == KvType::BF16)];
        for (a, b) in rounded.iter().flatten().zip(exact.iter().flatten()) {
            *worst = worst.max((a - b).abs());
        }
    }
    println!("largest differences, f16 and bf16: {worst:?}");
    assert!(differ > 50 && worst[0] < 0.02 && worst[1] < 0.15, "{differ} {worst:?}");
}

/// The comparison sees a single bit, and a difference of one ULP in one input reaches the outputs of a float op.
#[test]
fn one_ulp_is_seen() {
    for case in cases().iter().filter(|c| c.rows() == 7) {
        let rig = Rig::new(case);
        let want = rig.run(&mut Interpreter::new());
        let mut got = want.clone();
        let Some(x) = got.iter_mut().flat_map(|o| o.iter_mut()).rev().find(|x| x.is_finite() && **x != 0.0)
        else {
            panic!("{case}: no finite output");
        };
        *x = f32::from_bits(x.to_bits() ^ 1);
        assert!(bits_equal(&got, &want).is_some(), "{case}");
        assert!(bits_equal(&want, &want).is_none(), "{case}");
    }
    let zero = vec![vec![0.0f32]];
    let minus = vec![vec![-0.0f32]];
    assert!(bits_equal(&zero, &minus).is_some(), "+0 and -0 differ");
    let nan = vec![vec![f32::from_bits(0x7FC0_0001)]];
    let other = vec![vec![f32::from_bits(0xFFC0_0000)]];
    assert!(bits_equal(&nan, &other).is_none(), "NaN payloads are outside the contract");
}

/// A device that has run one model counts anew for the next: paths, and values that were too large for a cache.
#[test]
fn a_device_counts_for_the_model_it_holds() {
    let Some(device) = StandIn::new("counts of one model after the other") else { return };
    let options = CudaOptions { search: device.search(), ..CudaOptions::default() };
    let mut backend = Cuda::on(device.driver(), &options).expect("the stand-in opens");
    let mut counted = |chosen: &dyn Fn(&Case) -> bool| -> Vec<String> {
        let cases = cases();
        let case = cases.iter().find(|case| chosen(case)).expect("there is one");
        Rig::new(case).run(&mut backend);
        let paths = backend.paths().into_iter().filter(|path| path.count > 0);
        paths.map(|path| path.path).collect()
    };
    let linear = |of: DType| move |case: &Case| matches!(*case, Case::Linear { dtype, .. } if dtype == of);
    let wild = |case: &Case| matches!(case, Case::Attention { kv: KvType::F16, wild: Some("v"), .. });
    let any = |paths: &[String], of: &str| paths.iter().any(|path| path.starts_with(of));
    let paths = counted(&wild);
    assert!(any(&paths, "attention.") && any(&paths, PathCount::SATURATED), "{paths:?}");
    let paths = counted(&linear(DType::Q4_0));
    assert!(any(&paths, "linear.int.") && !any(&paths, "attention.") && !any(&paths, PathCount::SATURATED));
    let paths = counted(&linear(DType::F32));
    assert!(any(&paths, "linear.f32x32.") && !any(&paths, "linear.int."), "{paths:?}");
}
