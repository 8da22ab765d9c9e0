//! Whole models on the CUDA backend, on the stand-in that runs its kernels on the host: bits of the CPU, graphs that were
//! proved, and what happens when something in the way of a graph fails.

use std::sync::Arc;

use ingle_cuda::stand_in::StandIn;
use ingle_cuda::{Cuda, CudaOptions};
use ingle_engine::parity;
use ingle_graph::{Backend, PlanOptions};
use ingle_tensor::Checkpoint;

use super::fixture;
use crate::cpu;

fn open(device: &StandIn, eager: bool) -> Cuda {
    let options = CudaOptions { search: device.search(), eager, ..CudaOptions::default() };
    Cuda::on(device.driver(), &options).expect("the stand-in opens")
}

/// A small model in mixed formats, prompt and generated tokens: every hidden state and logit has the CPU's bits.
#[test]
fn a_model_has_the_bits_of_the_cpu() {
    let Some(device) = StandIn::new("a whole model on CUDA") else { return };
    let path = fixture("gguf/qwen3-s1-wide/model-q4_k_m.gguf");
    let checkpoint = Arc::new(Checkpoint::open(&path).expect("a fixture"));
    let open: [&mut dyn FnMut() -> _; 2] =
        [&mut || Ok(cpu(1, None)), &mut || Ok(Box::new(open(&device, false)) as Box<dyn Backend>)];
    let parity = parity::devices(&checkpoint, PlanOptions::default(), 3, open, &mut |_, _| ());
    let parity = parity.expect("both run");
    assert_eq!(parity.first, None, "{parity:?}");
    assert!(parity.steps > 3 && parity.values > 100_000, "{parity:?}");
}
