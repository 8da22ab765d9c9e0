//! Files that are refused by the name of a tensor, by every backend or before there is one.

use std::sync::Arc;

use ingle_graph::reference::Interpreter;
use ingle_graph::{Backend, Builder, Graph, KvPlan, PlanOptions, Result};
use ingle_tensor::{Checkpoint, DType, gguf};

use crate::cpu;

/// A tensor of a small file.
struct Tensor {
    name: &'static str,
    dtype: DType,
    shape: &'static [usize],
    bytes: Vec<u8>,
}

impl Tensor {
    /// f32 values.
    fn f32(name: &'static str, shape: &'static [usize], values: &[f32]) -> Self {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Self { name, dtype: DType::F32, shape, bytes }
    }

    /// A matrix `w.weight` of 2 rows and 64 columns, all bytes 1 but for those given.
    fn matrix(dtype: DType, bytes: &[(usize, u8)]) -> Self {
        let mut all = vec![1; 2 * dtype.row_bytes(64).expect("whole blocks")];
        bytes.iter().for_each(|&(at, byte)| all[at] = byte);
        Self { name: "w.weight", dtype, shape: &[2, 64], bytes: all }
    }
}

/// The checkpoint of a file with these tensors, and the model `w x`, with x from the table `x.weight`.
fn model(tensors: &[Tensor]) -> (tempfile::NamedTempFile, Arc<Checkpoint>, Result<Graph>) {
    let mut writer = gguf::Writer::new();
    writer.set("general.architecture", "case").expect("a fresh key");
    let table = Tensor::f32("x.weight", &[4, 64], &[0.5; 256]);
    for tensor in tensors.iter().chain([&table]) {
        writer
            .tensor(tensor.name, tensor.dtype, tensor.shape, tensor.bytes.as_slice())
            .expect("a fresh tensor");
    }
    let file = tempfile::Builder::new().suffix(".gguf").tempfile().expect("a temporary file");
    writer.write(&mut file.as_file()).expect("room for a small file");
    let checkpoint = Arc::new(Checkpoint::open(file.path()).expect("the file just written"));
    let mut b = Builder::new(&checkpoint);
    let x = b.embed("x.weight", 4, 64, 1.0);
    let w = b.matrix("w.weight", 2, 64);
    let y = b.linear("y", x, w, None);
    b.output("y", y);
    let graph = b.finish();
    (file, checkpoint, graph)
}

/// The error with which each backend refuses the weights, or none.
fn loads(tensors: &[Tensor]) -> Vec<Option<String>> {
    let (_file, checkpoint, graph) = model(tensors);
    let graph = graph.expect("a well-formed graph");
    let kv = KvPlan::uniform(&graph, 1, 32);
    let mut backends: [Box<dyn Backend>; 2] = [Box::new(Interpreter::new()), cpu(1, None)];
    let load = |backend: &mut Box<dyn Backend>| {
        backend.load(&graph, checkpoint.clone(), &PlanOptions::default(), kv.clone())
    };
    backends.iter_mut().map(|backend| load(backend).err().map(|error| error.to_string())).collect()
}

/// MXFP4's 255 and NVFP4's 0x7f are "not a number", in whichever block they stand.
#[test]
fn scales_without_a_finite_meaning() {
    for (dtype, at, code) in
        [(DType::MXFP4, 3 * 17, 0xff), (DType::NVFP4, 36 + 2, 0x7f), (DType::NVFP4, 36 + 2, 0xff)]
    {
        for error in loads(&[Tensor::matrix(dtype, &[(at, code)])]) {
            let error = error.expect("a refusal");
            assert!(
                error.contains("w.weight") && error.contains(&format!("scale code {code:#04x}")),
                "{error}"
            );
        }
        assert_eq!(loads(&[Tensor::matrix(dtype, &[(at, code - 1)])]), [None, None], "{dtype} {code:#x} - 1");
    }
}

/// The scale of a matrix is one finite number other than 0, and there is a matrix that it scales. It is not ignored.
#[test]
fn scales_of_matrices() {
    let refused = |scale: Tensor| {
        let name = scale.name;
        let (_file, _checkpoint, graph) = model(&[Tensor::matrix(DType::NVFP4, &[]), scale]);
        let error = graph.expect_err("a refusal").to_string();
        assert!(error.contains(name) || name == "x.scale" && error.contains("x.weight"), "{error}");
        error
    };
    for value in [0.0, -0.0, f32::NAN, f32::INFINITY] {
        assert!(refused(Tensor::f32("w.scale", &[1], &[value])).contains("finite and not 0"));
    }
    assert!(refused(Tensor::f32("w.scale", &[2], &[1.0, 2.0])).contains("one number"));
    assert!(refused(Tensor::f32("output.scale", &[1], &[2.0])).contains("output.weight"));
    assert!(refused(Tensor::f32("x.scale", &[1], &[2.0])).contains("looked up"));
    let good = Tensor::f32("w.scale", &[1], &[1e-42]);
    assert!(model(&[Tensor::matrix(DType::NVFP4, &[]), good]).2.is_ok());
}
