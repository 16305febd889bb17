"""Writes docs/what-watch-tells-you.md: trains five networks as people train them and shows what `watch` says of each.

`make docs-watched` runs it (minutes). Texts come from Python's own documentation and images from scikit-learn's digits,
so that anybody gets the same page, up to the last digits.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

import equilibria as eq
from equilibria.lab.data import load_digits
from equilibria.lab.data.batches import CHARACTERS, TextBatches, python_documentation
from equilibria.lab.nets import BasicBlockResNet
from equilibria.lab.nets.gpt import GPT
from equilibria.watching import WatchedRun

PAGE = Path(__file__).parent / "what-watch-tells-you.md"
WIDTH = 100


# ---- the trainings


def bn_resnet() -> WatchedRun:
    """SGD with momentum and a cosine, stepped every epoch."""
    digits = load_digits()
    model = BasicBlockResNet(16, (1, 1, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    epochs, batches = 20, digits.train_labels.split(64)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=epochs)
    monitor = eq.watch(model, optimizer, every=5, steps_per_epoch=len(batches))
    for _ in range(epochs):
        for chosen in torch.randperm(len(digits.train_labels)).split(64):
            optimizer.zero_grad()
            images = digits.train_images[chosen]
            noisy = images + 2 * torch.randn_like(images)  # or such a network soon knows all digits by heart
            loss = functional.cross_entropy(model(noisy), digits.train_labels[chosen])
            loss.backward()
            optimizer.step()
            monitor.log(loss=loss)
        scheduler.step()
    return monitor


class ViT(nn.Module):
    """Patches of 2x2 pixels, four pre-norm blocks of torch's own encoder."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.to_patch_embedding = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, width), nn.LayerNorm(width))
        self.cls_token = nn.Parameter(torch.randn(1, 1, width))
        self.pos_embedding = nn.Parameter(torch.randn(1, 17, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.transformer = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.mlp_head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Images to logits."""
        x = self.to_patch_embedding(functional.unfold(images, 2, stride=2).transpose(1, 2))
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embedding
        return self.mlp_head(self.transformer(x)[:, 0])


def vit() -> WatchedRun:
    """AdamW with one cycle of lr."""
    digits, model, steps = load_digits(), ViT(), 400
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.05)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps)
    monitor = eq.watch(model, optimizer, every=5)
    for _ in range(steps):
        chosen = torch.randint(len(digits.train_labels), (64,))
        optimizer.zero_grad()
        images = digits.train_images[chosen]
        noisy = images + 2 * torch.randn_like(images)
        loss = functional.cross_entropy(model(noisy), digits.train_labels[chosen])
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.log(loss=loss)
    return monitor


def text_batches(size: int, length: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Stretches of Python's documentation, and the same one character later."""
    return iter(TextBatches(python_documentation(), length=length, batch_size=size))


def nanogpt() -> WatchedRun:
    """nanoGPT's loop: two groups, accumulated gradients, clipping, an lr written into the groups."""
    model, steps, peak = GPT(CHARACTERS, 64, layers=6, context=64, positions="learnt"), 600, 1e-3
    decayed = [param for param in model.parameters() if param.ndim >= 2]
    others = [param for param in model.parameters() if param.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    monitor, batches = eq.watch(model, optimizer, every=5), text_batches(8, 64)
    for step in range(steps):
        for group in optimizer.param_groups:
            along = (step - 50) / (steps - 50)
            group["lr"] = peak * ((step + 1) / 51 if step < 50 else 0.1 + 0.45 * (1 + math.cos(math.pi * along)))
        for _ in range(2):
            inputs, targets = next(batches)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        monitor.log(loss=loss)
    return monitor


def qwen3() -> WatchedRun:
    """A Qwen3 from its configuration: RMSNorm before the matrices, and on queries and keys."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=CHARACTERS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    model, steps = Qwen3ForCausalLM(config), 500
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 50))
    monitor, batches = eq.watch(model, optimizer, every=5), text_batches(8, 64)
    for _ in range(steps):
        inputs, _ = next(batches)
        optimizer.zero_grad()
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        monitor.log(loss=loss)
    return monitor


def gan() -> WatchedRun:
    """Two networks, two Adams without weight decay, two steps in turn."""
    real = functional.hardtanh(load_digits().train_images)
    model = nn.ModuleDict(
        {
            "G": nn.Sequential(
                *(nn.ConvTranspose2d(16, 64, 4, bias=False), nn.BatchNorm2d(64), nn.ReLU()),
                *(nn.ConvTranspose2d(64, 1, 4, 2, 1, bias=False), nn.Tanh()),
            ),
            "D": nn.Sequential(
                *(nn.Conv2d(1, 32, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)),
                *(nn.Conv2d(32, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.LeakyReLU(0.2)),
                *(nn.Conv2d(64, 1, 4, bias=False), nn.Flatten(0)),
            ),
        }
    )
    for param in model.parameters():
        if param.ndim == 4:
            nn.init.normal_(param, 0.0, 0.02)
    adams = {
        name: torch.optim.Adam(network.parameters(), lr=2e-4, betas=(0.5, 0.999)) for name, network in model.items()
    }
    monitor = eq.watch(model, list(adams.values()), every=5)
    for _ in range(400):
        adams["D"].zero_grad()
        fake, losses = model["G"](torch.randn(64, 16, 1, 1)), []
        for batch, label in ((real[torch.randint(len(real), (64,))], 1.0), (fake.detach(), 0.0)):
            scores = model["D"](batch)
            losses.append(functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, label)))
            losses[-1].backward()
        adams["D"].step()
        adams["G"].zero_grad()
        scores = model["D"](fake)
        generator_loss = functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
        generator_loss.backward()
        adams["G"].step()
        monitor.log(discriminator_loss=sum(losses), generator_loss=generator_loss)
    return monitor


# ---- the page

HEAD = """# What `watch` tells you on ...

<!-- Written by docs/what_watch_tells.py: do not edit. -->

Five networks, trained as people train them, each with the two lines of the [front page](index.md), `every=5` (the
runs are short) and `monitor.log(loss=loss)`. What follows is the output of `print(monitor.table())` at the end, word
for word, and how to read it. The networks are small and the data come with scikit-learn and Python, so that you can
repeat it in a few minutes: `python docs/what_watch_tells.py`.

In all tables `rad/step` is the angle that a weight turns per step over the named steps. A *prediction* comes from the
law of scale-invariant weights where a normalisation makes the weight one, and from a measured [growth
gain](concepts/gain.md) G for other matrices. Nobody asked [`symmetries`](symmetries.md) here, so that `watch`
judges by the gradient alone, and says *looks* and *undecided* ([findings](findings.md) has the rule).
"""

SECTIONS = {
    bn_resnet: (
        "A ResNet with BatchNorm",
        """\
`BasicBlockResNet(16, (1, 1, 1))` on digits under noise, SGD with lr 0.1, momentum 0.9 and weight decay 5e-4, a
cosine that is stepped every epoch.""",
        """\
Every convolution feeds a BatchNorm, so it looks scale-invariant; the last layer does not, and has a measured gain.
The ratios say that the recursion from norm, lr and weight decay explains the speed of the layers; 13 samples do not
make certain that the early ones turn a tenth faster. *equilibrium* is where this lr x wd would lead if it stayed:
under a cosine it does not, and the norms of the convolutions, 1.2 to 1.4 times `norm*`, say how far they lag
behind. In the last fifth of the run every epoch has another lr: the line below the table says that it is left out.
Nothing to do.""",
    ),
    vit: (
        "A vision transformer",
        """\
Four pre-norm blocks of torch's encoder, 48 wide, AdamW with weight decay 0.05 under `OneCycleLR` to 3e-3.""",
        """\
Normalisation comes before the matrices of a pre-norm block, so that none of them is scale-invariant by itself: all
predictions come from measured gains. The headline is of the last steps before lr is next to nothing, and names
their lr. Gains are unsure there: a gain is the growth of the norm per squared angle, and both are small. Nine
samples do not judge predictions to 10 %; `every=1` would. To find out what is invariant:
`eq.symmetries(eq.objective(model, loss), batches)`.""",
    ),
    nanogpt: (
        "nanoGPT's loop",
        """\
Six pre-norm blocks, 64 wide, on the text of Python's documentation; AdamW (0.9, 0.95) with two groups,
accumulated gradients, clipping at 1, and an lr that the loop writes into the groups: warm-up, then a cosine to a tenth.
""".rstrip(),
        """\
Matrices of one kind share a row with their median and range. In five of six blocks they turn alike, within a factor of
1.5; the first block's `down` is slower than its siblings, and has the largest norm among them, which is the news of
this run. No matrix is scale-invariant, and all turn as their measured gains predict. The norm of an attention output
grows fastest, pushed outward by the gradient; at 5,000 steps of time constant, 600 steps are too few for an
equilibrium.""",
    ),
    qwen3: (
        "A Qwen3",
        """\
`Qwen3ForCausalLM` from a small configuration (4 layers, 64 wide, tied embedding), AdamW with lr 2e-3 and weight
decay 0.1, 50 steps of warm-up.""",
        """\
Its queries and keys are normalised (QK-norm), look scale-invariant and have a prediction, which holds. They
turn nearly three times as fast as in equilibrium because their norms are still half of what lr x wd asks for: at
1/(2 lr wd) = 2,500 steps of time constant, 500 steps are a beginning. The finding says so, and what starting in
equilibrium did when it was tried; it is a note, since nothing is wrong.""",
    ),
    gan: (
        "A GAN",
        """\
Generator and discriminator in the manner of dcgan, each with an Adam (0.5, 0.999) of its own without weight
decay; `eq.watch(model, [adam_d, adam_g])`.""",
        """\
Two optimizers that step in turn count as one step. The generator's first layer feeds a BatchNorm and looks
scale-invariant; without weight decay there is no equilibrium, its norm only grows, slowly here. `D.2` feeds a BatchNorm
too, but its weights start so small that the eps of the normalisation counts: its gradient is not orthogonal to it.""",
    ),
}


def main() -> None:
    """Train, and write the page."""
    os.environ["COLUMNS"] = str(WIDTH)
    parts = [HEAD]
    for train, (title, setting, reading) in SECTIONS.items():
        torch.manual_seed(0)
        with train() as monitor:
            output = str(monitor.table())
        sys.stdout.write(f"{title}\n{output}\n\n")
        parts.append(f"## {title}\n\n{setting}\n\n```text\n{output}\n```\n\n{reading}\n")
    PAGE.write_text("\n".join(parts), encoding="utf-8")


if __name__ == "__main__":
    main()
