//! Measures the encoders of checkpoints: `cargo run --release -p forebay-format --example encode_rates`.
//!
//! Small items, laid out and rendered into memory; and `.metadata` of a million chunks in three shapes, written to a
//! sink that counts. Prints times, bytes, and the most memory that the process had.

use std::error::Error;
use std::io::Write;
use std::time::{Duration, Instant};

use forebay_error::Result as ForebayResult;
use forebay_format::crc::crc32;
use forebay_format::dcp::{
    GlueSource, ItemSpec, KeyStep, LayoutOptions, MetadataWriter, Segment, StorageMeta,
    TensorProps, TorchDtype, plan_files,
};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

const PROPS: TensorProps =
    TensorProps { dtype: TorchDtype::Float32, requires_grad: true, pin_memory: false };

/// Every item holds the same bytes.
struct Same([u8; 64]);

impl GlueSource for Same {
    fn crc(&self, _: usize) -> u32 {
        crc32(&self.0)
    }

    fn copy(&self, _: usize, from: u64, into: &mut [u8]) -> ForebayResult<()> {
        into.copy_from_slice(&self.0[from as usize..][..into.len()]);
        Ok(())
    }
}

#[derive(Default)]
struct Counted(u64);

impl Write for Counted {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn main() -> Result<()> {
    let mut out = std::io::stdout().lock();
    for _ in 0..3 {
        small_items(&mut out)?;
    }
    for (tensors, chunks) in [(1000, 1000), (1_000_000, 1), (1, 1_000_000)] {
        let (time, bytes) = metadata(tensors, chunks)?;
        let seconds = time.as_secs_f64();
        let memory = peak_memory();
        writeln!(
            out,
            "metadata of {tensors} x {chunks} chunks: {seconds:.3} s, {bytes} bytes, {memory}"
        )?;
    }
    Ok(())
}

fn small_items(out: &mut impl Write) -> Result<()> {
    let count = 20_000;
    let item = || ItemSpec::Tensor { dtype: TorchDtype::Float32, shape: vec![16] };
    let items: Vec<_> = (0..count).map(|_| item()).collect();
    let start = Instant::now();
    let files = plan_files(&items, &LayoutOptions::default())?;
    let planned = start.elapsed();
    let source = Same([7; 64]);
    let mut buffer = vec![0; 4 << 20];
    let mut bytes = 0;
    for file in &files {
        for segment in &file.segments {
            if let Segment::Glue { len, .. } = segment {
                file.glue(segment, &source, &mut buffer[..*len as usize])?;
                bytes += len;
            }
        }
    }
    let total = start.elapsed();
    writeln!(out, "{count} small items: planned in {planned:?}, all in {total:?}, {bytes} bytes")?;
    Ok(())
}

fn metadata(tensors: u32, chunks: u32) -> Result<(Duration, u64)> {
    let start = Instant::now();
    let mut writer = MetadataWriter::new(Counted::default())?;
    let shape = [u64::from(chunks) * 8, 4096];
    for tensor in 0..tensors {
        writer.tensor(&format!("model.layers.{tensor}.mlp.weight"), &PROPS, &shape)?;
        for chunk in 0..chunks {
            writer.chunk(&[u64::from(chunk) * 8, 0], &[8, 4096])?;
        }
    }
    for tensor in 0..tensors {
        let number = tensor.to_string();
        let steps = ["model", "layers", &number, "mlp", "weight"].map(KeyStep::Key);
        writer.path(tensor, &steps)?;
    }
    for chunk in 0..chunks {
        let file = format!("00c0ffee-1_{chunk}_0.distcp");
        for tensor in 0..tensors {
            writer.stored(tensor, chunk, &file, u64::from(tensor) * 135_168, 132_000)?;
        }
    }
    let done = writer.finish(&StorageMeta::default(), &[])?;
    Ok((start.elapsed(), done.0))
}

/// The line of `/proc/self/status` that says it.
fn peak_memory() -> String {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with("VmHWM")).unwrap_or("memory unknown");
    line.split_whitespace().collect::<Vec<_>>().join(" ")
}
