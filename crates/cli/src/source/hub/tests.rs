//! The hub against a stand-in server: every way in which a download ends.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use serde_json::json;
use tempfile::TempDir;

use super::super::cache::{Cache, part_paths};
use super::super::spec::Spec;
use super::super::stand_ins::server::{Reply, Request, Server};
use super::super::stand_ins::{noise, sha256};
use super::*;

const BYTES: usize = 700_000;
const ETAG: &str = "\"v1\"";

/// Notes, kept.
#[derive(Default)]
struct Kept {
    notes: Vec<String>,
    bytes: u64,
}

impl Progress for Kept {
    fn start(&mut self, _: &str, bytes_done: u64, _: Option<u64>) {
        self.bytes = bytes_done;
    }
    fn advance(&mut self, bytes: u64) {
        self.bytes += bytes;
    }
    fn finish(&mut self) {}
    fn note(&mut self, line: &str) {
        self.notes.push(line.into());
    }
}

/// A cache of its own and a hub to fill it from.
struct Bench {
    folder: TempDir,
    hub: Hub,
    spec: HubSpec,
}

impl Bench {
    fn new(endpoint: &str, token: Option<&str>, model: &str) -> Self {
        Self::with_patience(endpoint, token, model, Duration::from_secs(20))
    }

    /// For servers that fall silent: as long as a busy machine may take between two reads.
    fn impatient(endpoint: &str, model: &str) -> Self {
        Self::with_patience(endpoint, None, model, Duration::from_secs(2))
    }

    fn with_patience(endpoint: &str, token: Option<&str>, model: &str, wait: Duration) -> Self {
        let patience = Patience { connect: wait, answer: wait, stall: wait };
        let hub = Hub::new(endpoint, token.map(String::from), patience).unwrap();
        let Ok(Spec::Hub(spec)) = Spec::parse(model) else { panic!("{model}") };
        Bench { folder: tempfile::tempdir().unwrap(), hub, spec }
    }

    fn cache(&self) -> Cache {
        Cache::at(self.folder.path())
    }

    fn fetch(&self, kept: &mut Kept) -> Result<PathBuf> {
        let room = self.cache().lock(&Spec::Hub(self.spec.clone()), kept)?;
        self.hub.fetch(&self.spec, &room, kept)
    }

    fn target(&self) -> PathBuf {
        let HubSpec { owner, repo, file } = &self.spec;
        self.folder.path().join("hf").join(owner).join(repo).join(file.as_ref().unwrap())
    }

    /// Puts a part of `bytes` in place, as an earlier attempt would have left it.
    fn leave_part(&self, bytes: &[u8], etag: &str) {
        let [part, state] = part_paths(&self.target());
        fs::create_dir_all(part.parent().unwrap()).unwrap();
        fs::write(part, bytes).unwrap();
        fs::write(state, json!({ "etag": etag, "bytes": BYTES }).to_string()).unwrap();
    }

    /// Everything in the room that is not a finished file.
    fn leftovers(&self) -> Vec<String> {
        let folder = self.folder.path().join("hf").join(&self.spec.owner).join(&self.spec.repo);
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        let names = entries.map(|entry| entry.file_name().into_string().unwrap());
        names.filter(|name| name.contains(".part") || name.contains(".tmp")).collect()
    }
}

fn listing(files: &[(&str, &[u8])]) -> Reply {
    let sibling = |(name, body): &(&str, &[u8])| match name.ends_with(".json") {
        true => json!({ "rfilename": name, "size": body.len() }),
        false => json!({ "rfilename": name, "lfs": { "size": body.len(), "sha256": sha256(body) } }),
    };
    let siblings: Vec<_> = files.iter().map(sibling).collect();
    Reply::new(200, json!({ "sha": "c0ffee", "siblings": siblings }).to_string())
}

/// A hub with the one file `m.gguf`, whose n-th request for it (from 0) is answered by `answer`.
fn hub_with(body: &[u8], answer: impl Fn(usize, &Request, &[u8]) -> Reply + Send + Sync + 'static) -> Server {
    let (body, count) = (body.to_vec(), AtomicUsize::new(0));
    Server::start(move |request| match request.path.starts_with("/api/models/a/b?") {
        true => listing(&[("README.md", b""), ("m.gguf", &body)]),
        false => answer(count.fetch_add(1, Ordering::SeqCst), request, &body),
    })
}

/// The requests for the file itself, as (Range, If-Range).
fn ranges(server: &Server) -> Vec<(Option<String>, Option<String>)> {
    let of_file =
        server.requests().into_iter().filter(|request| request.path == "/a/b/resolve/c0ffee/m.gguf");
    let text = |request: &Request, name| request.header(name).map(String::from);
    of_file.map(|request| (text(&request, "range"), text(&request, "if-range"))).collect()
}

fn asked(start: usize) -> (Option<String>, Option<String>) {
    (Some(format!("bytes={start}-")), Some(ETAG.into()))
}

/// Fetches `hf:a/b:m.gguf` and expects these bytes and no leftovers.
fn check_fetched(bench: &Bench, kept: &mut Kept, body: &[u8]) {
    let path = bench.fetch(kept).unwrap();
    assert_eq!(path, bench.target());
    assert!(fs::read(path).unwrap() == body, "other bytes");
    assert_eq!(bench.leftovers(), [""; 0]);
    assert_eq!(kept.bytes, body.len() as u64);
}

#[test]
fn token_goes_to_the_endpoint_alone() {
    let body = noise(BYTES, 1);
    let stored = body.clone();
    let store = Server::start(move |request| Reply::file(request, &stored, ETAG));
    let location = format!("{}/blob?signature=1", store.url());
    let digest = sha256(&body);
    let hub = hub_with(&body, move |n, _, _| match n {
        0 => Reply::redirect("/a/b-renamed/m.gguf"),
        _ => Reply::redirect(&location).with("x-linked-etag", &format!("\"{digest}\"")),
    });
    let bench = Bench::new(&format!("{}/", hub.url()), Some("secret\n"), "hf:a/b:m.gguf");
    check_fetched(&bench, &mut Kept::default(), &body);
    let paths: Vec<String> = hub.requests().iter().map(|request| request.path.clone()).collect();
    assert_eq!(paths, ["/api/models/a/b?blobs=true", "/a/b/resolve/c0ffee/m.gguf", "/a/b-renamed/m.gguf"]);
    assert!(hub.requests().iter().all(|request| request.header("authorization") == Some("Bearer secret")));
    let stored = store.requests();
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].path, "/blob?signature=1");
    assert_eq!(stored[0].header("authorization"), None);
}

#[test]
fn refusals_say_what_to_do() {
    let rows = [
        (401, None, "set HF_TOKEN"),
        (403, Some("secret"), "HF_TOKEN does not open it"),
        (404, None, "check the name"),
        (416, None, "answered 416"),
        (503, None, "try again later"),
    ];
    for (status, token, words) in rows {
        for listing_too in [true, false] {
            let hub = hub_with(b"model", move |_, _, _| Reply::new(status, "no"));
            let closed = Server::start(move |_| Reply::new(status, "no"));
            let url = if listing_too { closed.url() } else { hub.url() };
            let bench = Bench::new(&url, token, "hf:a/b:m.gguf");
            let error = bench.fetch(&mut Kept::default()).unwrap_err().to_string();
            assert!(error.contains(words), "{status}: {error}");
            assert_eq!(bench.leftovers(), [""; 0], "{status}");
        }
    }
}

#[test]
fn cut_is_gone_on_with_at_once() {
    let body = noise(BYTES, 2);
    let hub = hub_with(&body, |n, request, body| match n {
        0 => Reply::file(request, body, ETAG).cut_after(300_000),
        1 => Reply::file(request, body, ETAG).cut_after(100_000),
        _ => Reply::file(request, body, ETAG),
    });
    let bench = Bench::new(&hub.url(), None, "hf:a/b:m.gguf");
    check_fetched(&bench, &mut Kept::default(), &body);
    assert_eq!(ranges(&hub), [(None, None), asked(300_000), asked(400_000)]);
}

#[test]
fn cut_again_and_again_keeps_the_part() {
    let body = noise(BYTES, 3);
    let hub = hub_with(&body, |n, request, body| {
        let reply = Reply::file(request, body, ETAG);
        if n == 0 { reply.cut_after(1000) } else { reply.cut_after(0) }
    });
    let bench = Bench::new(&hub.url(), None, "hf:a/b:m.gguf");
    let error = bench.fetch(&mut Kept::default()).unwrap_err().to_string();
    assert!(error.contains("broke off") && error.contains("1000 bytes are kept"), "{error}");
    assert_eq!(ranges(&hub).len(), 4);
    assert!(fs::read(&part_paths(&bench.target())[0]).unwrap() == body[..1000]);
}

#[test]
fn silent_server_is_given_up_in_time() {
    let hub = hub_with(b"", |_, _, _| Reply::silence());
    let bench = Bench::impatient(&hub.url(), "hf:a/b:m.gguf");
    let start = Instant::now();
    let error = bench.fetch(&mut Kept::default()).unwrap_err().to_string();
    assert!(error.contains("m.gguf: no answer within 2s"), "{error}");
    let waited = start.elapsed();
    assert!((Duration::from_secs(2)..Duration::from_secs(20)).contains(&waited), "{waited:?}");
}

#[test]
fn stalled_transfer_is_gone_on_with_next_time() {
    let body = noise(BYTES, 4);
    let hub = hub_with(&body, |n, request, body| match n {
        0 => Reply::file(request, body, ETAG).stall_after(250_000),
        _ => Reply::file(request, body, ETAG),
    });
    let bench = Bench::impatient(&hub.url(), "hf:a/b:m.gguf");
    let error = bench.fetch(&mut Kept::default()).unwrap_err().to_string();
    assert!(error.contains("nothing arrived for 2s; 250000 bytes are kept"), "{error}");
    assert_eq!(bench.cache().lookup(&Spec::Hub(bench.spec.clone())), None);
    assert_eq!(bench.cache().list().unwrap(), []);
    check_fetched(&bench, &mut Kept::default(), &body);
    assert_eq!(ranges(&hub), [(None, None), asked(250_000)]);
}

#[test]
fn unreachable_server_is_given_up_at_once() {
    // No program gets this port by chance, as it may one that was free a moment ago.
    let bench = Bench::new("http://127.0.0.1:1", None, "hf:a/b:m.gguf");
    let error = bench.fetch(&mut Kept::default()).unwrap_err();
    assert!(matches!(error, Error::Network { .. }), "{error}");
    // The system's own words, and not those for a wait that was too long.
    assert!(error.to_string().starts_with("http://127.0.0.1:1: Connection refused"), "{error}");
}

#[test]
fn part_that_no_longer_fits_is_replaced() {
    let body = noise(BYTES, 5);
    let longer = noise(BYTES + 1, 6);
    let other = noise(BYTES - 5, 7);
    let rows: [(&str, &[u8], &str, usize); 5] = [
        // An ETag of before: the server ignores the range and sends all.
        ("changed file", &other, "\"v0\"", 1),
        // Too long to be a part of it: nothing is asked for.
        ("too long", &longer, ETAG, 1),
        // Right ETag, wrong bytes: the checksum finds out, and one fresh attempt follows.
        ("bad bytes", &other, ETAG, 2),
        // All there already: no request at all.
        ("complete", &body, ETAG, 0),
        ("empty", b"", ETAG, 1),
    ];
    for (what, part, etag, requests) in rows {
        let hub = hub_with(&body, |_, request, body| Reply::file(request, body, ETAG));
        let bench = Bench::new(&hub.url(), None, "hf:a/b:m.gguf");
        bench.leave_part(part, etag);
        let path = bench.fetch(&mut Kept::default()).unwrap_or_else(|error| panic!("{what}: {error}"));
        assert!(fs::read(path).unwrap() == body, "{what}: other bytes");
        assert_eq!(ranges(&hub).len(), requests, "{what}");
        assert_eq!(bench.leftovers(), [""; 0], "{what}");
    }
}

/// A hub that tells neither lengths nor digests: only ETag and `Content-Range` can tell that the file became shorter.
#[test]
fn range_beyond_the_end_starts_again() {
    let body = noise(BYTES, 8);
    let served = body.clone();
    let hub = Server::start(move |request| match request.path.starts_with("/api/") {
        true => Reply::new(200, r#"{"siblings": [{"rfilename": "m.gguf"}]}"#),
        false => Reply::file(request, &served, ETAG),
    });
    let bench = Bench::new(&hub.url(), None, "hf:a/b:m.gguf");
    bench.leave_part(&noise(BYTES + 10, 9), ETAG);
    check_fetched(&bench, &mut Kept::default(), &body);
    let asked: Vec<_> =
        hub.requests()[1..].iter().map(|request| request.header("range").map(String::from)).collect();
    assert_eq!(asked, [Some(format!("bytes={}-", BYTES + 10)), None]);
    assert_eq!(hub.requests()[1].path, "/a/b/resolve/main/m.gguf");
}

#[test]
fn wrong_bytes_are_deleted() {
    let body = noise(BYTES, 10);
    let hub = hub_with(&body, |_, request, body| {
        let mut body = body.to_vec();
        body[BYTES / 2] ^= 1;
        Reply::file(request, &body, ETAG)
    });
    let bench = Bench::new(&hub.url(), None, "hf:a/b:m.gguf");
    let error = bench.fetch(&mut Kept::default()).unwrap_err();
    assert!(matches!(error, Error::Checksum { .. }), "{error}");
    assert!(error.to_string().contains(&sha256(&body)), "{error}");
    assert_eq!((bench.leftovers(), bench.target().exists()), (Vec::new(), false));
    assert_eq!(ranges(&hub).len(), 1);
}

#[test]
fn another_file_is_refused_before_it_is_sent() {
    let body = noise(BYTES, 11);
    let rows =
        [("x-linked-etag", sha256(b"other"), "is wanted"), ("x-linked-size", "7".into(), "offers 7 bytes")];
    for (name, value, words) in rows {
        let store = Server::start(|_| Reply::new(200, ""));
        let location = store.url();
        let hub = hub_with(&body, move |_, _, _| Reply::redirect(&location).with(name, &value));
        let bench = Bench::new(&hub.url(), None, "hf:a/b:m.gguf");
        let error = bench.fetch(&mut Kept::default()).unwrap_err().to_string();
        assert!(error.contains(words), "{name}: {error}");
        assert_eq!(bench.leftovers(), [""; 0], "{name}");
    }
}

#[test]
fn endless_redirects_end() {
    let hub = hub_with(b"", |_, request, _| Reply::redirect(&request.path));
    let error =
        Bench::new(&hub.url(), None, "hf:a/b:m.gguf").fetch(&mut Kept::default()).unwrap_err().to_string();
    assert!(error.contains("more than 10 redirects"), "{error}");
}

#[cfg(target_os = "linux")]
#[test]
fn full_disk_leaves_nothing_behind() {
    let body = noise(BYTES, 12);
    let hub = hub_with(&body, |_, request, body| Reply::file(request, body, ETAG));
    let bench = Bench::new(&hub.url(), None, "hf:a/b:m.gguf");
    let [part, _] = part_paths(&bench.target());
    fs::create_dir_all(part.parent().unwrap()).unwrap();
    // Every write to this device fails as on a full disk.
    std::os::unix::fs::symlink("/dev/full", &part).unwrap();
    let error = bench.fetch(&mut Kept::default()).unwrap_err();
    assert!(matches!(error, Error::Full { .. }), "{error}");
    assert!(error.to_string().contains("INGLE_CACHE"), "{error}");
    assert_eq!(bench.leftovers(), [""; 0]);
    check_fetched(&bench, &mut Kept::default(), &body);
}

/// A repository with these files, each of which holds its own name.
fn repository(files: &'static str) -> Server {
    Server::start(move |request| {
        let names = files.split_whitespace();
        match request.path.starts_with("/api/") {
            true => listing(&names.map(|name| (name, name.as_bytes())).collect::<Vec<_>>()),
            false => {
                match names.into_iter().find(|name| request.path == format!("/a/b/resolve/c0ffee/{name}")) {
                    Some(name) => Reply::file(request, name.as_bytes(), ETAG),
                    None => Reply::new(404, ""),
                }
            }
        }
    })
}

#[test]
fn what_a_repository_means() {
    let split = "m-00001-of-00002.gguf m-00002-of-00002.gguf";
    let rows = [
        ("m-Q8_0.gguf m-Q4_K_M.gguf", "hf:a/b", Ok("m-Q4_K_M.gguf")),
        ("m-Q8_0.gguf m-Q4_K_M.gguf", "hf:a/b:m-Q8_0.gguf", Ok("m-Q8_0.gguf")),
        ("sub/m.gguf", "hf:a/b", Ok("sub/m.gguf")),
        (split, "hf:a/b", Ok("m-00001-of-00002.gguf")),
        (split, "hf:a/b:m-00002-of-00002.gguf", Ok("m-00001-of-00002.gguf")),
        ("m-Q8_0.gguf m-F16.gguf", "hf:a/b", Err("carries 2 model files; name one, as in hf:a/b:m-F16.gguf")),
        ("m-Q8_0.gguf", "hf:a/b:x.gguf", Err("has no x.gguf; it has m-Q8_0.gguf")),
        ("README.md", "hf:a/b", Err("has no GGUF file and no safetensors")),
    ];
    for (files, model, expected) in rows {
        let server = repository(files);
        let bench = Bench::new(&server.url(), None, model);
        match (bench.fetch(&mut Kept::default()), expected) {
            (Ok(path), Ok(file)) => {
                assert_eq!(path, bench.folder.path().join("hf/a/b").join(file), "{model}");
                assert_eq!(fs::read_to_string(&path).unwrap(), file, "{model}");
                // The next time it is found without the network.
                assert_eq!(bench.cache().lookup(&Spec::Hub(bench.spec.clone())), Some(path), "{model}");
            }
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{model}: {error}"),
            (found, expected) => panic!("{model}: {found:?} where {expected:?} was expected"),
        }
    }
}

/// A safetensors repository at a commit that tests may move, with a weight file that fails on demand.
#[derive(Default)]
struct Checkpoint {
    commit: AtomicUsize,
    is_broken: AtomicUsize,
}

impl Checkpoint {
    fn serve(self: Arc<Self>) -> Server {
        Server::start(move |request| {
            let commit = self.commit.load(Ordering::SeqCst);
            let index = json!({ "weight_map": { "x": "w-1.safetensors", "y": "w-2.safetensors", "z": "w-1.safetensors" } });
            let body = |name: &str| match name {
                "model.safetensors.index.json" => index.to_string(),
                name => format!("{name} of {commit}"),
            };
            let names = [
                ".gitattributes",
                "config.json",
                "consolidated.safetensors",
                "m.gguf",
                "model.safetensors.index.json",
                "tokenizer.json",
                "w-1.safetensors",
                "w-2.safetensors",
            ];
            if request.path.starts_with("/api/") {
                let siblings: Vec<_> = names.iter().map(|name| json!({ "rfilename": name })).collect();
                return Reply::new(
                    200,
                    json!({ "sha": format!("c{commit}"), "siblings": siblings }).to_string(),
                );
            }
            let name = request.path.strip_prefix(&format!("/a/b/resolve/c{commit}/")).unwrap_or_default();
            match name == "w-2.safetensors" && self.is_broken.load(Ordering::SeqCst) == 1 {
                true => Reply::new(503, ""),
                false => Reply::file(request, body(name).as_bytes(), ETAG),
            }
        })
    }
}

#[test]
fn folder_is_whole_or_not_there() {
    let checkpoint = Arc::new(Checkpoint::default());
    let server = checkpoint.clone().serve();
    let bench = Bench::new(&server.url(), None, "hf:a/b");
    let spec = Spec::Hub(bench.spec.clone());
    let fetched = |from: usize| -> Vec<String> {
        let requests = server.requests();
        requests[from..].iter().map(|request| request.path.rsplit('/').next().unwrap().to_string()).collect()
    };

    checkpoint.is_broken.store(1, Ordering::SeqCst);
    bench.fetch(&mut Kept::default()).unwrap_err();
    assert_eq!(bench.cache().lookup(&spec), None);
    assert_eq!(bench.cache().list().unwrap(), []);

    // What arrived before is not fetched again, and the configuration comes last.
    checkpoint.is_broken.store(0, Ordering::SeqCst);
    let so_far = server.requests().len();
    let folder = bench.fetch(&mut Kept::default()).unwrap();
    assert_eq!(fetched(so_far), ["b?blobs=true", "w-2.safetensors", "config.json"]);
    assert_eq!(bench.cache().lookup(&spec), Some(folder.clone()));
    let mut names: Vec<_> =
        fs::read_dir(&folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.retain(|name| !name.starts_with('.'));
    names.sort();
    assert_eq!(
        names,
        [
            "config.json",
            "model.safetensors.index.json",
            "tokenizer.json",
            "w-1.safetensors",
            "w-2.safetensors"
        ]
    );
    let models = bench.cache().list().unwrap();
    assert_eq!(models.len(), 1);
    assert_eq!((models[0].name.as_str(), &models[0].spec), ("b", &spec));
}

#[test]
fn folder_never_mixes_commits() {
    let checkpoint = Arc::new(Checkpoint::default());
    let server = checkpoint.clone().serve();
    let bench = Bench::new(&server.url(), None, "hf:a/b");
    checkpoint.is_broken.store(1, Ordering::SeqCst);
    bench.fetch(&mut Kept::default()).unwrap_err();
    assert!(bench.folder.path().join("hf/a/b/w-1.safetensors").is_file());
    checkpoint.is_broken.store(0, Ordering::SeqCst);
    checkpoint.commit.store(1, Ordering::SeqCst);
    let folder = bench.fetch(&mut Kept::default()).unwrap();
    for name in ["config.json", "tokenizer.json", "w-1.safetensors", "w-2.safetensors"] {
        assert_eq!(fs::read_to_string(folder.join(name)).unwrap(), format!("{name} of 1"));
    }
}

#[test]
fn names_are_escaped() {
    assert_eq!(escaped("sub folder/m#1%.gguf"), "sub%20folder/m%231%25.gguf");
}
