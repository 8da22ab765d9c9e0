//! Capture windows and the graphs that come out of them.
//!
//! A window belongs to the thread that opened it, as the driver's thread-local mode has it. While it is open, this thread
//! is refused everything that a captured step must not do: allocating, waiting, copying from memory of the host, a replay.
//! A refused allocation cancels the capture even when the caller goes on. A graph keeps alive what it refers to: memory and
//! kernels.

use std::any::Any;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ptr::null_mut;
use std::sync::Arc;

use super::memory::{Allocation, Raw};
use super::sys::{DriverFunctions, Handle};
use super::{Context, Function, Span, Stream};
use crate::{Error, Result};

/// What a window has seen.
#[derive(Default)]
struct Window {
    /// The first allocation or free that was wanted: kind and bytes.
    missed: Option<(&'static str, usize)>,
    /// Memory that was dropped meanwhile: freeing it has to wait.
    parked: Vec<Raw>,
    /// What the graph refers to, once each.
    kept: Vec<Arc<dyn Any + Send + Sync>>,
    seen: BTreeSet<usize>,
}

impl Window {
    fn keep<T: Any + Send + Sync>(&mut self, used: &Arc<T>) {
        if self.seen.insert(Arc::as_ptr(used).addr()) {
            self.kept.push(used.clone());
        }
    }
}

thread_local! {
    static WINDOW: RefCell<Option<Window>> = const { RefCell::new(None) };
}

/// Runs `f` on this thread's window, if one is open.
fn in_window<T>(f: impl FnOnce(&mut Window) -> T) -> Option<T> {
    // A thread that ends has no window.
    WINDOW.try_with(|window| window.borrow_mut().as_mut().map(f)).ok().flatten()
}

/// That no window is open on this thread.
///
/// # Errors
/// [`Error::Refused`] with what was wanted.
pub(super) fn outside(what: &str) -> Result<()> {
    match in_window(|_| ()) {
        None => Ok(()),
        Some(()) => Err(Error::Refused(format!("{what} inside a capture window"))),
    }
}

/// That memory may be allocated; otherwise the window is as good as cancelled.
///
/// # Errors
/// [`Error::InWindow`].
pub(super) fn allow(what: &'static str, bytes: usize) -> Result<()> {
    match in_window(|window| window.missed.get_or_insert((what, bytes)).to_owned()) {
        None => Ok(()),
        Some(_) => Err(Error::InWindow { what, bytes }),
    }
}

/// Frees memory, or lets the window of this thread do it when it closes, which it then does without a graph.
pub(super) fn park(raw: Raw) {
    let mut raw = Some(raw);
    in_window(|window| {
        if let Some(raw) = raw.take() {
            window.missed.get_or_insert(("a free", raw.bytes()));
            window.parked.push(raw);
        }
    });
}

/// Notes what a recorded launch refers to.
pub(super) fn keep<'a>(function: &Function, memory: impl Iterator<Item = &'a Arc<Allocation>>) {
    in_window(|window| {
        window.keep(&function.module.0);
        memory.for_each(|memory| window.keep(memory));
    });
}

/// Notes what a recorded copy refers to.
pub(super) fn keep_spans(spans: &[Span<'_>]) {
    in_window(|window| spans.iter().for_each(|span| window.keep::<Allocation>(span.owner())));
}

/// Closes the window and ends the capture however it is left, a panic included.
struct Closing<'a> {
    stream: &'a Stream,
    ended: bool,
}

impl Closing<'_> {
    /// The captured graph (null when the driver gave none up), and what the window saw.
    fn end(&mut self) -> (Result<Handle>, Window) {
        self.ended = true;
        let mut graph = null_mut();
        // SAFETY: the stream is being captured by this thread; the pointer is to our own variable.
        let end = |f: &DriverFunctions| unsafe { (f.capture_end)(self.stream.handle, &mut graph) };
        let ended = self.stream.context.call(end, || "cuStreamEndCapture".into());
        let window = WINDOW.take().unwrap_or_default();
        (ended.map(|()| graph), window)
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        if !self.ended
            && let (Ok(graph), _window) = self.end()
        {
            destroy(&self.stream.context, graph);
        }
    }
}

fn destroy(context: &Context, graph: Handle) {
    if !graph.is_null() {
        // SAFETY: the graph came from a capture of ours and is referred to nowhere.
        context.call(|f| unsafe { (f.graph_destroy)(graph) }, || "cuGraphDestroy".into()).ok();
    }
}

/// A graph that can be replayed.
pub struct Graph {
    context: Context,
    exec: Handle,
    nodes: usize,
    /// Freed after the graph itself is gone.
    _kept: Vec<Arc<dyn Any + Send + Sync>>,
}

// SAFETY: the driver's graphs may be used from any thread, from one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        // It may still run.
        self.context.synchronize().ok();
        // SAFETY: instantiated by us.
        self.context
            .call(|f| unsafe { (f.graph_exec_destroy)(self.exec) }, || "cuGraphExecDestroy".into())
            .ok();
        self.context.ledger().freed(0);
    }
}

impl Graph {
    /// Nodes: kernels, copies and fills.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Issues everything that was recorded.
    ///
    /// # Errors
    /// Inside a capture window; a call that failed.
    pub fn launch(&self, stream: &Stream) -> Result<()> {
        outside("a replay")?;
        // SAFETY: our own graph and stream; what the graph refers to is alive.
        let launch = |f: &DriverFunctions| unsafe { (f.graph_launch)(self.exec, stream.handle) };
        self.context.call(launch, || format!("cuGraphLaunch of {} nodes", self.nodes))
    }
}

impl Stream {
    /// Records what `step` issues to this stream from this thread, instead of running it.
    ///
    /// # Errors
    /// The error of `step`; an allocation or a free that was wanted meanwhile, even if `step` went on; a capture that the
    /// driver refuses. Nothing ran then, and the stream is as before.
    pub fn capture(&self, step: impl FnOnce() -> Result<()>) -> Result<Graph> {
        outside("a second capture")?;
        let context = &self.context;
        // SAFETY: our own stream; 1 is CU_STREAM_CAPTURE_MODE_THREAD_LOCAL.
        context.call(|f| unsafe { (f.capture_begin)(self.handle, 1) }, || "cuStreamBeginCapture".into())?;
        WINDOW.set(Some(Window::default()));
        let mut closing = Closing { stream: self, ended: false };
        let stepped = step();
        let (graph, mut window) = closing.end();
        let missed = window.missed.map_or(Ok(()), |(what, bytes)| Err(Error::InWindow { what, bytes }));
        // The reason that comes first is the one to tell: the step's own, then the window's, then the driver's.
        match stepped.and(missed) {
            Err(error) => {
                destroy(context, graph.unwrap_or(null_mut()));
                Err(error)
            }
            Ok(()) => {
                let graph = graph?;
                let instance = self.instantiate(graph, std::mem::take(&mut window.kept));
                destroy(context, graph);
                instance
            }
        }
    }

    /// Whether the driver captures this stream.
    ///
    /// # Errors
    /// A call that failed.
    pub fn is_capturing(&self) -> Result<bool> {
        let mut status = 0;
        // SAFETY: our own stream; the pointer is to our own integer.
        let get = |f: &DriverFunctions| unsafe { (f.capture_status)(self.handle, &mut status) };
        self.context.call(get, || "cuStreamIsCapturing".into())?;
        Ok(status != 0)
    }

    fn instantiate(&self, graph: Handle, kept: Vec<Arc<dyn Any + Send + Sync>>) -> Result<Graph> {
        let context = &self.context;
        let (mut exec, mut nodes) = (null_mut(), 0);
        // SAFETY: a graph of ours; without an array only the count is stored.
        let count = |f: &DriverFunctions| unsafe { (f.graph_nodes)(graph, null_mut(), &mut nodes) };
        context.call(count, || "cuGraphGetNodes".into())?;
        // SAFETY: a graph of ours; the pointer is to our own variable; no flags.
        let instantiate = |f: &DriverFunctions| unsafe { (f.graph_instantiate)(&mut exec, graph, 0) };
        context.call(instantiate, || format!("cuGraphInstantiate of {nodes} nodes"))?;
        context.ledger().allocated(0);
        let graph = Graph { context: context.clone(), exec, nodes, _kept: kept };
        // SAFETY: instantiated above; what a first launch would bring to the device is brought now.
        let upload = |f: &DriverFunctions| unsafe { (f.graph_upload)(graph.exec, self.handle) };
        context.call(upload, || format!("cuGraphUpload of {nodes} nodes"))?;
        Ok(graph)
    }
}
