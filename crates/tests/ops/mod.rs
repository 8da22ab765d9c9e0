//! The op case table: ops x formats x odd shapes x rows 1, 2, 7, 64, each run on the scalar reference and on every path
//! of every device, compared as bits; layers with a window keep a ring of pages, and the reference everything. One table
//! serves every backend.

mod cases;
mod formats;
mod harness;
mod refusals;

use std::collections::{BTreeMap, BTreeSet};

use ingle_cuda::stand_in::StandIn;
use ingle_cuda::{Cuda, CudaOptions};
use ingle_graph::reference::Interpreter;
use ingle_graph::{FloatArithmetic, KvType, mma};

use crate::{Device, devices, not_run};
use cases::{Case, cases};
use harness::{Difference, Rig, bits_equal};

/// What came of cases on one device.
#[derive(Default)]
struct Cell {
    /// Cases with the reference's bits.
    equal: usize,
    /// Cases run.
    cases: usize,
    /// Paths that their products took, as the device counted them.
    paths: BTreeSet<String>,
}

/// By what cases test and by device.
type Table = BTreeMap<String, BTreeMap<String, Cell>>;

/// Runs every case on every path, prints the bits table and returns it.
fn check(float: FloatArithmetic, filter: impl Fn(&Case) -> bool) -> Table {
    let mut failures = Vec::new();
    let mut table = Table::new();
    let mut absent = vec!["cpu neon (its target is not installed)".to_string()];
    for case in cases().iter().filter(|c| filter(c)) {
        let rig = Rig::new(case).in_arithmetic(float);
        let all = matches!(case, Case::Attention { window: Some(_), .. });
        let all = all.then(|| Rig::keeping_all(case).in_arithmetic(float));
        let want = all.as_ref().unwrap_or(&rig).run(&mut Interpreter::new());
        for device in devices().into_iter().filter(|device| device.runs(float)) {
            let Some(mut backend) = device.open() else {
                absent.push(device.to_string());
                continue;
            };
            let cell = table.entry(case.group()).or_default().entry(device.to_string()).or_default();
            cell.cases += 1;
            let got = rig.run(&mut *backend);
            let engaged = backend.paths().into_iter().filter(|path| path.count > 0);
            cell.paths.extend(engaged.map(|path| path.path).filter(|path| path.starts_with("linear.")));
            match bits_equal(&got, &want) {
                None => cell.equal += 1,
                Some(Difference { at, got, want }) => failures.push(format!(
                    "{case} on {device}: {at}: {got:e} ({:08x}), reference {want:e} ({:08x})",
                    got.to_bits(),
                    want.to_bits()
                )),
            }
        }
    }
    print(&table);
    absent.sort();
    absent.dedup();
    not_run(&absent);
    let runs: usize = table.values().flat_map(|row| row.values()).map(|cell| cell.cases).sum();
    assert!(runs > 0 || float != FloatArithmetic::F32x32, "no case ran");
    assert!(failures.is_empty(), "{} of {runs} differ:\n{}", failures.len(), failures.join("\n"));
    table
}

/// One line for each kind of case, one column for each path: cases with the reference's bits / cases run.
fn print(table: &Table) {
    for (i, (group, row)) in table.iter().enumerate() {
        if i == 0 {
            let names: Vec<String> = row.keys().map(|name| format!("{name:>14}")).collect();
            println!("{:28}{}", "equal bits / cases", names.join(""));
        }
        let cell = |cell: &Cell| format!("{:>14}", format!("{}/{}", cell.equal, cell.cases));
        let cells: Vec<String> = row.values().map(cell).collect();
        println!("{group:28}{}", cells.join(""));
    }
}

#[test]
fn attention_bits() {
    check(FloatArithmetic::F32x32, |c| matches!(c, Case::Attention { .. }));
}

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

/// Cases that tensor cores serve.
fn served(case: &Case) -> bool {
    matches!(*case, Case::Attention { head_dim, kv, .. } if mma::serves(head_dim, kv))
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

/// On a GPU tensor cores round in their own way, so that outputs are near the reference's, as [`mma::tolerance`] says. What is
/// promised as bits is that rows do not depend on what they are computed with.
#[test]
fn attention_in_mma_on_a_gpu() {
    let device = Device::Cuda;
    let wanted = devices().into_iter().any(|device| matches!(device, Device::Cuda));
    let Some(mut backend) = device.open().filter(|_| wanted) else {
        return not_run(&["cuda: attention in mma".into()]);
    };
    let mut failures = Vec::new();
    for case in cases().iter().filter(|case| served(case)) {
        let Case::Attention { kv, wild, .. } = *case else { continue };
        let rig = Rig::new(case).in_arithmetic(FloatArithmetic::Mma);
        let (together, want) = (rig.run(&mut *backend).concat(), rig.run(&mut Interpreter::new()).concat());
        for (i, (got, want)) in together.iter().zip(&want).enumerate() {
            // Huge scores turn last places into other weights.
            let tame = wild.is_none() || wild == Some("v");
            let largest = if wild == Some("v") { 65504.0 } else { 10.0 };
            let near = (got - want).abs() <= mma::tolerance(kv, largest) || got == want;
            if got.is_nan() != want.is_nan() || (tame && !got.is_nan() && !near) {
                failures.push(format!("{case}: element {i}: {got:e}, reference {want:e}"));
                break;
            }
        }
        let alone = rig.one_by_one().run(&mut *backend).concat();
        if let Some(Difference { at, got, want }) = bits_equal(&[alone], &[together]) {
            failures.push(format!("{case}: {at}: alone {got:e}, together {want:e}"));
        }
    }
    assert!(failures.is_empty(), "{}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn other_ops_bits() {
    check(FloatArithmetic::F32x32, |c| !matches!(c, Case::Linear { .. } | Case::Attention { .. }));
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
