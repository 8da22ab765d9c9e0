//! The op case table: ops x formats x odd shapes x rows 1, 2, 7, 64, each run on the scalar reference and on every path
//! of every device, compared as bits; layers with a window keep a ring of pages, and the reference everything. One table
//! serves every backend.

mod cases;
mod formats;
mod harness;
mod host;
mod refusals;

use std::collections::{BTreeMap, BTreeSet};

use ingle_graph::reference::Interpreter;
use ingle_graph::{FloatArithmetic, mma};

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

/// Cases that tensor cores serve.
fn served(case: &Case) -> bool {
    matches!(*case, Case::Attention { head_dim, kv, .. } if mma::serves(head_dim, kv))
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
