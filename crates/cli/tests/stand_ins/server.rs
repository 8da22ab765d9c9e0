//! A web server of one closure, on a free port of this machine.

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

/// Answers every request with what the closure returns, until dropped.
pub struct Server {
    address: SocketAddr,
    requests: Arc<Mutex<Vec<Request>>>,
    is_over: Arc<AtomicBool>,
}

/// What a client asked for.
#[derive(Debug, Clone)]
pub struct Request {
    /// Path and query.
    pub path: String,
    headers: Vec<(String, String)>,
}

/// What it gets.
#[derive(Debug, Clone, Default)]
pub struct Reply {
    status: u16,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
    /// Sends this much of the body, then `fault`.
    sent: Option<usize>,
    fault: Option<Fault>,
}

#[derive(Debug, Clone, Copy)]
enum Fault {
    Cut,
    Stall,
}

impl Server {
    /// Starts serving.
    pub fn start(answer: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
        let address = listener.local_addr().expect("an address");
        let (requests, is_over) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (answer, log, over) = (Arc::new(answer), requests.clone(), is_over.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if over.load(Ordering::SeqCst) {
                    break;
                }
                let (answer, log, over) = (answer.clone(), log.clone(), over.clone());
                // A client that hangs up early is part of many a test.
                thread::spawn(move || _ = serve(stream, &*answer, &log, &over));
            }
        });
        Server { address, requests, is_over }
    }

    /// Its address, without a slash at the end.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// All requests so far, in order.
    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().expect("no test panics here").clone()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
        // Wakes the listener.
        let _ = TcpStream::connect(self.address);
    }
}

impl Request {
    /// The value of a header; `name` in lower case.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }
}

impl Reply {
    /// An answer with a body.
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Reply { status, body: body.into(), ..Reply::default() }
    }

    /// A redirect.
    pub fn redirect(location: &str) -> Self {
        Reply::new(302, "").with("location", location)
    }

    /// Part or all of a file, as `Range` and `If-Range` ask for it.
    pub fn file(request: &Request, body: &[u8], etag: &str) -> Self {
        let range = request
            .header("range")
            .and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let range = range.filter(|_| request.header("if-range").is_none_or(|wanted| wanted == etag));
        let (total, reply) = (body.len(), |status, body: &[u8]| Reply::new(status, body).with("etag", etag));
        match range {
            None => reply(200, body),
            Some(start) if start >= total => {
                reply(416, b"").with("content-range", &format!("bytes */{total}"))
            }
            Some(start) => reply(206, &body[start..])
                .with("content-range", &format!("bytes {start}-{}/{total}", total - 1)),
        }
    }

    /// With one more header.
    pub fn with(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    /// Breaks off after so many bytes of the body.
    pub fn cut_after(self, bytes: usize) -> Self {
        Reply { sent: Some(bytes), fault: Some(Fault::Cut), ..self }
    }

    /// Falls silent after so many bytes of the body.
    pub fn stall_after(self, bytes: usize) -> Self {
        Reply { sent: Some(bytes), fault: Some(Fault::Stall), ..self }
    }

    /// Accepts the request and never says a word.
    pub fn silence() -> Self {
        Reply { status: 0, fault: Some(Fault::Stall), ..Reply::default() }
    }
}

fn serve(
    mut stream: TcpStream,
    answer: &dyn Fn(&Request) -> Reply,
    log: &Mutex<Vec<Request>>,
    is_over: &AtomicBool,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines();
    let first = lines.next().unwrap_or(Ok(String::new()))?;
    let mut headers = Vec::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(':') else { break };
        headers.push((name.to_ascii_lowercase(), value.trim().to_string()));
    }
    let request = Request { path: first.split(' ').nth(1).unwrap_or_default().into(), headers };
    log.lock().expect("no test panics here").push(request.clone());
    let reply = answer(&request);
    if reply.status != 0 {
        let mut head = format!(
            "HTTP/1.1 {} x\r\ncontent-length: {}\r\nconnection: close\r\n",
            reply.status,
            reply.body.len()
        );
        reply.headers.iter().for_each(|(name, value)| head += &format!("{name}: {value}\r\n"));
        stream.write_all((head + "\r\n").as_bytes())?;
        stream.write_all(&reply.body[..reply.sent.unwrap_or(reply.body.len())])?;
        stream.flush()?;
    }
    while matches!(reply.fault, Some(Fault::Stall)) && !is_over.load(Ordering::SeqCst) {
        thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}
